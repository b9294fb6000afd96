"""AdamW with its moments in host memory or quantized to 8 bits, and beside Muon."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.adamw import adamw as update

from isthmus.engine.linear.quantized_weight import bitsandbytes
from isthmus.engine.parallel.sharded_params import local_elements

if TYPE_CHECKING:
    from typing_extensions import Self

MOMENTS = ("exp_avg", "exp_avg_sq")
BLOCK = 256
"""Elements with the same scale in bitsandbytes' 8-bit optimizers."""
MIN_QUANTIZED = 4096
"""Smaller tensors keep float32 moments, as in bitsandbytes."""


def create_state(adam: torch.optim.Optimizer) -> None:
    """Create the state that AdamW and Muon have after a step: a checkpoint may be saved or loaded before.

    :class:`CpuOffloadAdamW` has its moments on the host only, so they need no memory on the device.
    """
    for group in adam.param_groups:
        for parameter in group["params"]:
            if group.get("muon"):
                adam.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}
                continue
            step = torch.zeros((), dtype=torch.float32, device=parameter.device if group["fused"] else "cpu")
            if isinstance(adam, AdamW8bit):
                moments = adam.new_moments(parameter)
                step = step.cpu() if "absmax" in moments else step
            elif isinstance(adam, CpuOffloadAdamW):
                # Copies overlap with computation only from pinned memory.
                host = {"dtype": parameter.dtype, "pin_memory": parameter.is_cuda}
                moments = {name: torch.zeros(parameter.shape, **host) for name in MOMENTS}
            else:
                moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS}
            adam.state[parameter] = {"step": step, **moments}


class _OnGroupsOfAdamW(torch.optim.AdamW):
    @classmethod
    def from_adamw(cls, adam: torch.optim.Optimizer) -> Self:
        """Take over the parameter groups of ``adam``, which has no state yet."""
        optimizer = cls([torch.empty(0)])
        # Some parameters are views of the model's buffers, which torch's constructor rejects.
        optimizer.param_groups = adam.param_groups
        return optimizer


class AdamWBesideMuon(_OnGroupsOfAdamW):
    """AdamW of the parameter groups that Muon leaves out."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """``closure`` is ignored."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group.get("muon")]
        super().step()
        self.param_groups = groups


class _AdamWByTensor(_OnGroupsOfAdamW):
    """AdamW that updates one parameter at a time."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """``closure`` is ignored."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, self.state[parameter], group)

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        update(
            [parameter],
            [gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
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
        )


class CpuOffloadAdamW(_AdamWByTensor):
    """AdamW with both moments on the host; saves 8 bytes per parameter on the device.

    A step copies the moments of one parameter at a time to the device and back: 16 bytes of transfer per parameter. It
    does not wait for the copies to the host; synchronize with the GPU before reading the moments.
    Main weights stay on the device.
    """

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        moments = {name: state[name].to(parameter.device, non_blocking=True) for name in MOMENTS}
        super()._update(parameter, gradient, state | moments, group)
        for name, moment in moments.items():
            if moment is not state[name]:
                state[name].copy_(moment, non_blocking=True)


class AdamW8bit(_AdamWByTensor):
    """AdamW of bitsandbytes (arXiv 2110.02861): moments of 8 bits and a float32 scale for each block of 256.

    Moments are flat [n], one uint8 an element; ``absmax`` is [2, blocks]. Checkpoints have float32 moments.
    """

    def new_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Zero, for this rank's elements."""
        elements = local_elements(parameter)
        moments = {name: torch.zeros_like(elements) for name in MOMENTS}
        return moments if elements.numel() < MIN_QUANTIZED else _quantized(moments)

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        elements, gradient = local_elements(parameter), local_elements(gradient)
        if "absmax" not in state:
            super()._update(elements, gradient, state, group)
            return
        state["step"] += 1  # on the host
        codes, absmax = _codes(elements.device), state["absmax"]
        (beta1, beta2), no_third = group["betas"], 0.0
        bitsandbytes().optimizer_update_8bit_blockwise(
            "adam",
            gradient,
            elements,
            *(state[name] for name in MOMENTS),
            beta1,
            beta2,
            no_third,
            no_third,
            group["eps"],
            int(state["step"]),
            group["lr"],
            *codes,
            *absmax,
            group["weight_decay"],
        )

    @contextmanager
    def float32_moments(self, *, loading: bool) -> Iterator[None]:
        """Within the block the state has float32 moments, in host memory; ``loading`` quantizes them afterwards."""
        states = {parameter: state for parameter, state in self.state.items() if "absmax" in state}
        for parameter, state in states.items():
            codes = _codes(state["absmax"].device)
            moments = {
                name: _dequantized(state[name], absmax, code).cpu()
                for name, absmax, code in zip(MOMENTS, state["absmax"], codes, strict=True)
            }
            self.state[parameter] = {"step": state["step"], **moments}
        yield
        for parameter, state in states.items():
            if loading:
                loaded = {name: self.state[parameter][name].to(state["absmax"].device) for name in MOMENTS}
                for name, tensor in _quantized(loaded).items():
                    state[name].copy_(tensor)
            self.state[parameter] = state


@contextmanager
def float32_moments(optimizers: Iterable[torch.optim.Optimizer], *, loading: bool) -> Iterator[None]:
    """:meth:`AdamW8bit.float32_moments` of those with 8-bit moments."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            if isinstance(optimizer, AdamW8bit):
                stack.enter_context(optimizer.float32_moments(loading=loading))
        yield


@functools.cache
def _codes(device: torch.device) -> tuple[Tensor, Tensor]:
    """The values of the 256 codes of the first and of the second moment, float32, ascending."""
    create = bitsandbytes().create_dynamic_map
    return create(signed=True).to(device), create(signed=False).to(device)


def _dequantized(moment: Tensor, absmax: Tensor, code: Tensor) -> Tensor:
    return code[moment.int()] * absmax.repeat_interleave(BLOCK)[: moment.numel()]


def _quantized(moments: dict[str, Tensor]) -> dict[str, Tensor]:
    """8-bit moments of float32 ones; of dequantized moments, those that they came from, so that runs resume bitwise."""
    codes = _codes(next(iter(moments.values())).device)
    values_and_scales = {
        name: _quantize(moment, code) for (name, moment), code in zip(moments.items(), codes, strict=True)
    }
    quantized = {name: values for name, (values, _) in values_and_scales.items()}
    return quantized | {"absmax": torch.stack([absmax for _, absmax in values_and_scales.values()])}


def _quantize(moment: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    blocks = functional.pad(moment, (0, -moment.numel() % BLOCK)).view(-1, BLOCK)
    # The code of the largest magnitude is 1, or that of a negative one 0.99: its quotient has errors of rounding.
    negative = (-blocks).amax(1) / (-code[0]).clamp(min=0.5)
    absmax = torch.maximum(blocks.amax(1), negative)
    middles = (code[1:] + code[:-1]) / 2
    best, exact, values = absmax, torch.full_like(absmax, -1), torch.zeros_like(blocks, dtype=torch.uint8)
    for steps in (0, 1, -1, 2, -2):
        tried = absmax
        for _ in range(abs(steps)):
            tried = torch.nextafter(tried, torch.full_like(tried, float("inf") if steps > 0 else 0.0))
        nearest = torch.bucketize(blocks / tried.clamp(min=torch.finfo(tried.dtype).tiny)[:, None], middles)
        equal = (code[nearest] * tried[:, None] == blocks).sum(1)
        better = equal > exact
        best, exact = torch.where(better, tried, best), torch.where(better, equal, exact)
        values = torch.where(better[:, None], nearest.to(torch.uint8), values)
    return values.flatten()[: moment.numel()].contiguous(), best
