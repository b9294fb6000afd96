"""Matmuls by either library: the same values in full float32, for any memory layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.engine.linear import matmul as module
from isthmus.engine.linear.input_exchange import NO_EXCHANGE
from isthmus.engine.linear.linear import _fused_linear, _LinearIntoMainGrad
from isthmus.engine.linear.matmul import add_matmul, matmul
from isthmus.platforms.torch_features import ONEDNN_MATMUL

ONEDNN = torch.backends.mkldnn.is_available() and module._onednn_is_exact()


@pytest.fixture(params=["onednn", "torch"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Float32 precision setting of oneDNN at each matmul."""
    if request.param == "onednn" and not ONEDNN:
        pytest.skip("here oneDNN is no faster, or does not keep float32")
    precisions: list[str] = []
    inside = module._onednn

    @contextmanager
    def watched() -> Iterator[None]:
        with inside():
            precisions.append(ONEDNN_MATMUL.fp32_precision)
            yield

    monkeypatch.setitem(module.LIBRARIES, "onednn", watched)  # type: ignore[arg-type]
    monkeypatch.setattr(module, "_onednn_is_exact", lambda: request.param == "onednn")
    monkeypatch.setattr(module, "ONEDNN_MIN_FLOP", 2 * 20 * 12)
    return precisions


def used(library: list[str], request: pytest.FixtureRequest) -> bool:
    return set(library) == ({"bf16"} if "onednn" in request.node.callspec.id else set())


def close(got: Tensor, a: Tensor, b: Tensor) -> bool:
    return got.dtype == a.dtype and torch.allclose(got.double(), a.double() @ b.double(), rtol=0, atol=1e-4)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("rows", [(1,), (7,), (33, 1), (3, 2)])
def test_any_layout(library: list[str], rows: tuple[int, ...], request: pytest.FixtureRequest) -> None:
    a, b = drawn(*rows, 20), drawn(20, 12)
    transposed, wide = drawn(12, 20).t(), drawn(20, 30)
    assert close(matmul(a, b), a, b) and matmul(a, b).shape == (*rows, 12)
    assert close(matmul(a, transposed), a, transposed)
    assert close(matmul(a, wide[:, 5:17]), a, wide[:, 5:17])
    turned = drawn(20, *rows).movedim(0, -1)
    assert close(matmul(turned, b), turned, b)
    room = torch.empty(*rows, 12)
    assert matmul(a, b, out=room) is room and close(room, a, b)
    assert used(library, request)
    assert ONEDNN_MATMUL is None or ONEDNN_MATMUL.fp32_precision == "none"
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("shape", [(64, 80, 96), (300, 512, 1024), (2, 4096, 77)])
@pytest.mark.parametrize("way", ["forward", "grad_x", "grad_w", "added"])
def test_float32_is_exact(library: list[str], shape: tuple[int, int, int], way: str) -> None:
    """Each result is one of the 24-bit inputs, so any rounding changes it."""
    tokens, inputs, outputs = shape
    fine = torch.randint(1 << 23, 1 << 24, (tokens, inputs), generator=torch.Generator().manual_seed(0)).float()
    column = torch.arange(outputs) % inputs
    picks = torch.zeros(inputs, outputs)
    picks[column, torch.arange(outputs)] = 1.0
    expected = fine[:, column]
    if way == "forward":
        assert torch.equal(matmul(fine, picks.t().contiguous().t()), expected)
    elif way == "grad_x":
        assert torch.equal(matmul(fine, picks), expected)
    elif way == "grad_w":
        assert torch.equal(matmul(fine.t().contiguous().t(), picks), expected)
    else:
        into = torch.zeros(tokens, outputs)
        add_matmul(into, fine.t().contiguous().t(), picks)
        assert torch.equal(into, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_and_empty_matmuls_use_the_default(library: list[str], dtype: torch.dtype) -> None:
    a, b = drawn(50, 40).to(dtype), drawn(40, 30).to(dtype)
    assert torch.equal(matmul(a, b), a @ b)
    assert matmul(drawn(0, 40), drawn(40, 30)).shape == (0, 30)
    assert not library


def test_small_and_unrepeated_matmuls_use_the_default(library: list[str]) -> None:
    a, b = drawn(1, 20), drawn(20, 12)
    matmul(a[:, :19], b[:19])
    add_matmul(torch.zeros(1, 12), a, b, shape_repeats=False)
    assert not library


def test_the_setting_is_restored_after_an_error(library: list[str]) -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        matmul(drawn(40, 20), drawn(30, 12))
    assert ONEDNN_MATMUL is None or ONEDNN_MATMUL.fp32_precision == "none"


def test_a_linear_layer_and_its_gradients(library: list[str], request: pytest.FixtureRequest) -> None:
    x, weight = drawn(40, 1, 8).requires_grad_(), torch.nn.Parameter(drawn(6, 8))
    weight.main_grad = torch.ones(6, 8)  # type: ignore[attr-defined]
    upstream = drawn(40, 1, 6)
    out = _LinearIntoMainGrad.apply(x, weight, NO_EXCHANGE)
    out.backward(upstream)
    assert close(out, x.detach(), weight.detach().t())
    assert x.grad is not None and close(x.grad, upstream, weight.detach())
    assert close(weight.main_grad - 1, upstream[:, 0].t(), x.detach()[:, 0])  # type: ignore[attr-defined]
    assert used(library, request) and len(library) in (0, 3)


def test_a_layer_computes_the_same_with_and_without_gradients(library: list[str]) -> None:
    """As a recomputed layer must: its first pass keeps no gradients."""
    x, weight = drawn(40, 1, 8), torch.nn.Parameter(drawn(6, 8))
    weight.main_grad = torch.zeros(6, 8)  # type: ignore[attr-defined]
    with torch.no_grad():
        first = _fused_linear(x, weight)
    second = _fused_linear(x, weight)
    assert first is not None and second is not None and torch.equal(first, second)


def adds(rounding: torch.dtype) -> Callable[..., Tensor]:
    """What a GPU may do: round the product, or not."""

    def addmm(total: Tensor, a: Tensor, b: Tensor, _dtype: torch.dtype, *, out: Tensor) -> Tensor:
        return torch.add(total, (a.float() @ b.float()).to(rounding), out=out)

    return addmm


def refuses(*_args: object, **_kwargs: object) -> Tensor:
    raise RuntimeError("gemm input type at::BFloat16 and output type float is not supported for ROCm\nat Blas.cpp")


@pytest.mark.parametrize(
    ("operator", "reason"),
    [
        (adds(torch.float32), None),
        (adds(torch.bfloat16), "rounds them on this GPU"),
        (adds(torch.float16), "rounds them on this GPU"),
        (refuses, "output type float is not supported for ROCm"),
        (None, "has no such matmul"),
    ],
)
def test_a_trial_decides_on_float32_sums(operator: Any, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ADDMM_INTO_FLOAT32", operator)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    result = module.no_float32_sums.__wrapped__(
        torch.device("cpu"), torch.float16 if operator is None else torch.bfloat16
    )
    assert (result is None) if reason is None else result.endswith(reason)
    monkeypatch.setattr(module, "no_float32_sums", lambda _device, _dtype: result)
    line = module.rounded_gradients("cuda", torch.bfloat16)
    assert (
        (line is None)
        if reason is None
        else (line.startswith("weight gradients: each is rounded to torch.bfloat16") and reason in line)
    )
    assert module.rounded_gradients("cpu", torch.bfloat16) is module.rounded_gradients("cuda", torch.float32) is None
