"""The memory estimate of any rank of a large layout is that of its trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fake_cuda.runner import FakeCuda
from fake_cuda.step_memory import RANKS, memory, memory_without_state


@pytest.mark.thorough_cases(
    "8B, first stage",
    "70B, a middle stage",
    "70B, recomputed",
    "8B, cp",
    "8B, virtual stages",
    "MLA",
    "experts, etp",
    "experts",
    "fsdp",
    "hsdp",
    "keys as values",
    "norms of experts",
    "shared keys, layer inputs",
)
@pytest.mark.parametrize("rank", RANKS)
def test_the_estimate_is_the_traced_memory(fake_cuda: FakeCuda, rank: str) -> None:
    results = fake_cuda.run(memory, **RANKS[rank])
    estimate = results["estimate"]
    if "fsdp" not in RANKS[rank]:  # whose estimate has the gathered weights, which are not there between steps
        assert estimate["persistent"] == pytest.approx(results["persistent"], rel=0.02)
    assert estimate["total"] == pytest.approx(results["peak"], rel=0.1)


@pytest.mark.thorough_cases("lora", "tp2", "dp8")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"tp": 2, "size": 2}, id="tp2"),
        pytest.param({"size": 8}, id="dp8"),
        pytest.param({"size": 8, "fsdp": True}, id="fsdp"),
        pytest.param({"sections": {"optim": {"offload": True}}}, id="moments on the host"),
        pytest.param({"sections": {"lora": {"rank": 16}}}, id="lora"),
    ],
)
def test_the_state_leaves_the_gpu_and_comes_back(fake_cuda: FakeCuda, settings: dict[str, Any]) -> None:
    """What is left is what the estimate has for generation; no copy waits, and a step needs what it needed before."""
    result = fake_cuda.run(memory_without_state, **settings)
    assert result["syncs"] == []
    assert result["within"] < result["before"]
    if "fsdp" not in settings:  # whose estimate has the gathered weights
        assert result["within"] == pytest.approx(result["estimate"], rel=0.02)
    assert result["after"] == result["before"] and result["peak_after"] == result["peak_before"]


def host_memory_without_registration() -> list[bool]:
    """Whether memory is page-locked, and whether the error of its registration is still the last one."""
    from isthmus.engine.host_copies import host_memory

    last: list[int] = []

    class Runtime:
        def cudaHostRegister(self, _address: int, _size: int, _flags: int) -> int:
            last.append(2)
            return 2

    class CheckedKernels(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.is_cuda and last:  # as torch does after a launch
                last.clear()
                raise RuntimeError("CUDA error: out of memory")
            return out

    torch.cuda.cudart = Runtime
    with CheckedKernels():
        memory = host_memory(1000, page_locked=True)
        is_left = bool(last)
    return [memory.is_pinned(), is_left, memory.numel() == 1000]


def test_a_failed_registration_leaves_no_error_to_the_next_kernel(fake_cuda: FakeCuda) -> None:
    assert fake_cuda.run(host_memory_without_registration) == [False, False, True]
