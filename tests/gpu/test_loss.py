"""The loss and weight gradients on a GPU: values against float64, kernels, memory, no compilation for each length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.engine.compiled import choose_compile, compiled_versions, set_compile
from isthmus.engine.linear import matmul
from isthmus.engine.loss.cross_entropy_gpu import TEMPORARY_BYTES, chunk_elements
from isthmus.engine.loss.linear_cross_entropy import VocabShard, linear_cross_entropy, token_cross_entropies

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
VOCAB, HIDDEN = 50257, 256  # an odd number of rows
ERRORS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


@pytest.fixture(params=["compiled", "eager"])
def regions(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "compiled":
        line = choose_compile("auto", DEVICE)
        if line is None or not line.startswith("compile: on"):
            pytest.skip(str(line))
    yield request.param
    set_compile(False)


def inputs(tokens: int, dtype: torch.dtype, vocab: int = VOCAB, width: int = HIDDEN) -> tuple[Tensor, Any, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=DEVICE).to(dtype).requires_grad_()
    weight: Any = torch.nn.Parameter((torch.randn(vocab, width, device=DEVICE) / 16).to(dtype))
    weight.main_grad = torch.zeros(vocab, width, device=DEVICE)
    return hidden, weight, torch.randint(0, vocab, (tokens,), device=DEVICE)


def reference(hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    wide = [item.detach().double().requires_grad_() for item in (hidden, weight)]
    logits = wide[0] @ wide[1].t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    grad_hidden, grad_weight = torch.autograd.grad(losses.sum(), wide)
    return losses.detach(), grad_hidden, grad_weight


def error(result: Tensor, expected: Tensor) -> float:
    return ((result.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_values(regions: str, dtype: torch.dtype, softcap: float | None) -> None:
    for per_token in (False, True):
        hidden, weight, labels = inputs(333, dtype)
        expected = reference(hidden, weight, labels, softcap)
        shard = VocabShard(softcap=softcap)
        if per_token:
            losses = token_cross_entropies(hidden, weight, labels, shard)
            losses.sum().backward()
            assert error(losses, expected[0]) < ERRORS[dtype]
        else:
            loss = linear_cross_entropy(hidden, weight, labels, shard)
            loss.backward()
            assert error(loss, expected[0].sum()) < ERRORS[dtype]
        assert hidden.grad is not None and error(hidden.grad, expected[1]) < ERRORS[dtype]
        assert error(weight.main_grad, expected[2]) < ERRORS[dtype]


def test_loss_scale_of_fp16(regions: str) -> None:
    hidden, weight, labels = inputs(333, torch.float16)
    expected = reference(hidden, weight, labels, None)
    scale = torch.full((), 1024.0, device=DEVICE)
    (linear_cross_entropy(hidden, weight, labels, grad_scale=scale) * scale).backward()
    assert hidden.grad is not None and error(hidden.grad / 1024, expected[1]) < ERRORS[torch.float16]
    assert error(weight.main_grad / 1024, expected[2]) < ERRORS[torch.float16]


def test_kernels_memory_and_compilation(regions: str) -> None:
    """Llama-3.2-1B at 8,192 tokens. Blocks that suit the cache of a CPU were 8,961 kernels."""
    arguments_by_tokens = {tokens: inputs(tokens, torch.bfloat16, 128256, 2048) for tokens in (8192, 8000)}
    linear_cross_entropy(*arguments_by_tokens[8192])
    compiled_versions.clear()
    for arguments in arguments_by_tokens.values():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            linear_cross_entropy(*arguments).backward()
            torch.cuda.synchronize()
        kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        assert 8 < len(kernels) <= (100 if regions == "compiled" else 300), kernels
        logits = min(chunk_elements(torch.device(DEVICE)), arguments[0].size(0) * 128256)
        temporary = 2 + (0 if regions == "compiled" else TEMPORARY_BYTES)
        assert torch.cuda.max_memory_allocated() - before < temporary * logits * 1.1 + 2**28
    assert compiled_versions.total() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(512, 4096, 256), (1000, 333, 504), (50257, 128, 64)])
def test_weight_gradients_are_summed_in_float32(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Rounding each product would be an error of 2^-9 or 2^-12."""
    device = torch.device(DEVICE, torch.cuda.current_device())
    if (reason := matmul.no_float32_sums(device, dtype)) is not None:
        pytest.skip(reason)
    outputs, tokens, width = shape
    torch.manual_seed(0)
    total, expected = torch.zeros(outputs, width, device=device), torch.zeros(outputs, width, device=device).double()
    for _ in range(4):
        grad, x = (
            torch.randn(tokens, outputs, device=device).to(dtype),
            torch.randn(tokens, width, device=device).to(dtype),
        )
        matmul.add_matmul(total, grad.t(), x)
        expected += grad.double().t() @ x.double()
    assert error(total, expected) < 1e-5
