"""Logits of a router: those of a float32 matmul, without a float32 copy of the hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isthmus.engine.compiled import set_compile
from isthmus.engine.linear import matmul
from isthmus.engine.moe import router_logits as module
from isthmus.engine.moe.router_logits import bfloat16_parts, router_logits

TOKENS, HIDDEN, EXPERTS = 37, 24, 6


def operands(dtype: torch.dtype, weight_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(EXPERTS, HIDDEN, generator=generator).to(weight_dtype or dtype).requires_grad_()
    return hidden, weight, torch.randn(TOKENS, EXPERTS, generator=generator)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [(torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, torch.float32), (torch.float32, None)],
)
def test_the_same_bits_as_a_float32_copy(dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    hidden, weight, upstream = operands(dtype, weight_dtype)
    expected = F.linear(hidden.float(), weight.float())
    saved: list[torch.dtype] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = router_logits(hidden, weight)
    assert logits.dtype == torch.float32 and torch.equal(logits, expected)
    gradients, references = (torch.autograd.grad(out, [hidden, weight], upstream) for out in (logits, expected))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(gradients, references, strict=True))
    assert sorted(map(str, saved)) == sorted(map(str, [hidden.dtype, weight.dtype]))


def addmm_into_float32(total: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, beta: float, out: Tensor) -> Tensor:
    """The operator of a GPU, which accepts 16-bit matrices only."""
    assert a.dtype == b.dtype == torch.bfloat16 and dtype == total.dtype == torch.float32 and beta == 0
    return out.copy_(a.double() @ b.double())


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.processes)], ids=["eager", "compiled"])
def compiled(request: pytest.FixtureRequest) -> Iterator[bool]:
    set_compile(request.param, device="cpu")
    yield request.param
    set_compile(False)


def test_parts_add_up_exactly(compiled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([1e-30, 1e-9, 1.0, -3.0, 1e9, 1e30])
    x = torch.randn(TOKENS, EXPERTS, generator=generator) * scales
    parts = bfloat16_parts(x)
    assert parts.dtype == torch.bfloat16 and torch.equal(parts.double().sum(1), x.double())
    assert not torch.equal(parts[:, :2].double().sum(1), x.double())  # two are not enough


def test_matmuls_of_a_gpu_give_the_numbers_of_a_float32_copy(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "ADDMM_INTO_FLOAT32", addmm_into_float32)
    monkeypatch.setattr(module, "_has_exact_matmul", lambda *_: True)
    hidden, weight, upstream = operands(torch.bfloat16)
    upstream = upstream * torch.logspace(-12, 3, TOKENS)[:, None]
    logits = router_logits(hidden, weight)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = exact[0] @ exact[1].t()
    assert torch.allclose(logits.double(), expected, rtol=1e-6, atol=1e-6)
    gradients = torch.autograd.grad(logits, [hidden, weight], upstream)
    references = torch.autograd.grad(expected, exact, upstream.double())
    for gradient, reference in zip(gradients, references, strict=True):
        # Rounded once, from float32 sums: half a unit in the last place of bfloat16.
        assert gradient.dtype == torch.bfloat16
        assert ((gradient.double() - reference).abs() <= reference.abs() * 2**-8).all()


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_operand_has_no_gradient(frozen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "ADDMM_INTO_FLOAT32", addmm_into_float32)
    for exact in (False, True):
        monkeypatch.setattr(module, "_has_exact_matmul", lambda *_, exact=exact: exact)
        tensors: list[Any] = list(operands(torch.bfloat16))
        tensors[frozen] = tensors[frozen].detach()
        router_logits(tensors[0], tensors[1]).backward(tensors[2])
        assert tensors[frozen].grad is None and tensors[1 - frozen].grad is not None
