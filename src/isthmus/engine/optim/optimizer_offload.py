"""Adam's running means in the machine's memory, for a GPU that the model itself nearly fills."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam as update

_MEANS = ("exp_avg", "exp_avg_sq")


class HostAdamW(torch.optim.AdamW):
    """AdamW that keeps its two running means on the host: 8 bytes less a parameter on the device.

    A step brings those of one parameter at a time to the device, updates there, and takes them back: 16 bytes over the
    bus a parameter. Main weights stay on the device. The arithmetic is that of torch's fused AdamW.
    """

    @classmethod
    def taking_over(cls, adam: torch.optim.AdamW) -> HostAdamW:
        """One over the very groups of ``adam``, whose state is filled; what it has counted goes along."""
        taken = cls([torch.empty(0)])
        taken.param_groups = adam.param_groups  # views of the model's buffers among them, which torch would not take
        for parameter, state in adam.state.items():
            pinned = parameter.is_cuda  # only pinned memory is copied while the device computes
            means = {name: torch.empty_like(parameter, device="cpu", pin_memory=pinned) for name in _MEANS}
            for name, mean in means.items():
                mean.copy_(state[name])
            taken.state[parameter] = state | means
        return taken

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; ``closure`` is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        if any(parameter.is_cuda for parameter in self.state):
            torch.cuda.current_stream().synchronize()  # a checkpoint reads the host's copy without asking the device

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        here = {name: state[name].to(parameter.device, non_blocking=True) for name in _MEANS}
        update(
            [parameter],
            [gradient],
            [here["exp_avg"]],
            [here["exp_avg_sq"]],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            decoupled_weight_decay=True,
        )
        for name, mean in here.items():
            if mean is not state[name]:
                state[name].copy_(mean, non_blocking=True)
