"""The check before a run computes with symmetric memory. Training with it: ``tests/ranks/test_layouts.py``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.engine.linear import async_tp
from isthmus.errors import UsageError

GROUP: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 1, group_name="tp")


def gather(x: Tensor, matrices: list[Tensor], dim: int, name: str) -> tuple[Tensor, list[Tensor]]:
    assert (dim, name) == (0, "tp")
    full = torch.cat((x / 2, x))
    return full, [full @ b for b in matrices]


def scatter(x: Tensor, b: Tensor, operation: str, dim: int, name: str) -> Tensor:
    assert (operation, dim, name) == ("sum", 0, "tp")
    return (x[:16] * 1.5) @ b


def wrong(x: Tensor, b: Tensor, *_more: Any) -> Tensor:
    return x[:16] @ b


def unconnected(*_args: Any) -> Any:
    raise RuntimeError("CUDASymmetricMemory requires p2p access\nException raised from rendezvous")


@pytest.mark.parametrize(
    ("operators", "reason"),
    [
        ({"fused_all_gather_matmul": gather, "fused_matmul_reduce_scatter": scatter}, None),
        ({"fused_all_gather_matmul": gather, "fused_matmul_reduce_scatter": wrong}, "its results are wrong"),
        ({"fused_all_gather_matmul": unconnected}, r"\(CUDASymmetricMemory requires p2p access\)"),
        ({}, "has no attribute 'fused_all_gather_matmul'"),
    ],
)
def test_gpus_that_cannot_compute_with_it_are_refused(
    operators: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_tp, "symmetric_memory_ops", lambda: SimpleNamespace(**operators))
    arguments = GROUP, torch.device("cpu"), torch.bfloat16
    if reason is None:
        async_tp.check_async_tp(*arguments)
        return
    with pytest.raises(UsageError, match=rf"parallel.async_tp=true: .*{reason}.*Leave parallel.async_tp out"):
        async_tp.check_async_tp(*arguments)
