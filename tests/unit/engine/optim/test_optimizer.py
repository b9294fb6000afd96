"""Optimizer state in host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isthmus.engine.optim.adamw import CpuOffloadAdamW, create_state


class MadeOnMeta(TorchDispatchMode):
    """Sums the elements of all results on the meta device."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.elements += result.numel() if isinstance(result, torch.Tensor) and result.is_meta else 0
        return result


@pytest.mark.parametrize(("offload", "device", "on_device"), [(False, "meta", 2001), (True, "cpu", 1)])
def test_offloaded_moments_are_never_created_on_the_device(offload: bool, device: str, on_device: int) -> None:
    """The meta device stands for a GPU."""
    weight = torch.empty(1000, device="meta", requires_grad=True)
    adam: torch.optim.Optimizer = torch.optim.AdamW([weight])
    adam.param_groups[0]["fused"] = True
    if offload:
        adam = CpuOffloadAdamW.from_adamw(adam)
    with MadeOnMeta() as created:
        create_state(adam)
    assert {adam.state[weight][name].device.type for name in ("exp_avg", "exp_avg_sq")} == {device}
    assert created.elements == on_device
