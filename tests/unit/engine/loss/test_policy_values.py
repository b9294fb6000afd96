"""Cross entropies and entropies of a policy equal those of torch on materialized logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from isthmus.engine.compiled import set_compile
from isthmus.engine.loss import cross_entropy_cpu, cross_entropy_gpu
from isthmus.engine.loss import policy_values as module
from isthmus.engine.loss.linear_cross_entropy import VocabShard
from isthmus.engine.loss.policy_values import policy_values

VOCAB, HIDDEN, TOKENS = 300, 16, 37


@pytest.fixture(params=["cpu", "gpu"], autouse=True)
def small_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of ten tokens, computed as on a CPU or as on a GPU."""
    monkeypatch.setattr(cross_entropy_cpu, "CHUNK_ELEMENTS", 10 * VOCAB)
    monkeypatch.setattr(cross_entropy_cpu, "BLOCK_ELEMENTS", 4 * VOCAB)
    monkeypatch.setattr(cross_entropy_gpu, "chunk_elements", lambda _device: 10 * VOCAB)
    if request.param == "gpu":
        monkeypatch.setattr(module, "device_code", lambda _hidden: cross_entropy_gpu)


def inputs(dtype: torch.dtype = torch.float32, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(tokens, HIDDEN), torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB)
    hidden, weight, bias = (tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, bias))
    return hidden, weight, bias, torch.randint(0, VOCAB, (tokens,))


def expected_values(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    *,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    logits = hidden @ weight.t() + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    return torch.stack([-distribution.log_prob(labels), distribution.entropy()])


def error(result: Tensor, expected: Tensor) -> float:
    return ((result.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_values_and_gradients(softcap: float | None, temperature: float) -> None:
    *leaves, labels = inputs()
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = expected_values(*wide, labels, softcap=softcap, temperature=temperature)
    factors = torch.randn(2, TOKENS)
    hidden, weight, bias = leaves
    shard = VocabShard(softcap=softcap, bias=bias, temperature=temperature)
    values = policy_values(hidden, weight, labels, shard, entropy_gradient=True)
    assert values.dtype == torch.float32
    assert error(values[0], expected[0]) < 1e-6 and error(values[1], expected[1]) < 1e-6
    gradients = torch.autograd.grad((values * factors).sum(), leaves)
    expected_gradients = torch.autograd.grad((expected * factors).sum(), wide)
    assert max(error(*pair) for pair in zip(gradients, expected_gradients, strict=True)) < 2e-6


def test_the_gradient_of_the_losses_alone() -> None:
    """Without ``entropy_gradient`` the entropies are constants."""
    *leaves, labels = inputs()
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = expected_values(*wide, labels, temperature=0.7)[0]
    hidden, weight, bias = leaves
    values = policy_values(hidden, weight, labels, VocabShard(bias=bias, temperature=0.7))
    gradients = torch.autograd.grad(values.sum(), leaves)
    expected_gradients = torch.autograd.grad(expected.sum(), wide)
    assert max(error(*pair) for pair in zip(gradients, expected_gradients, strict=True)) < 2e-6


def test_padding_rows_are_ignored() -> None:
    hidden, weight, bias, labels = inputs()
    padded = torch.cat([weight, torch.full((5, HIDDEN), 100.0)]).detach().requires_grad_()
    values = policy_values(hidden, padded, labels, VocabShard(rows=VOCAB), entropy_gradient=True)
    expected = expected_values(hidden, weight, torch.zeros_like(bias), labels)
    assert error(values, expected) < 1e-6
    (gradient,) = torch.autograd.grad(values.sum(), padded)
    assert not gradient[VOCAB:].any() and gradient[:VOCAB].any()


def test_a_frozen_weight_has_no_gradient() -> None:
    hidden, weight, _, labels = inputs()
    weight.requires_grad_(False)
    policy_values(hidden, weight, labels, entropy_gradient=True).sum().backward()
    assert weight.grad is None and hidden.grad is not None


def test_gradients_are_added_to_main_grad() -> None:
    hidden, weight, _, labels = inputs()
    (expected,) = torch.autograd.grad(policy_values(hidden, weight, labels, entropy_gradient=True).sum(), weight)
    weight.main_grad = torch.ones(VOCAB, HIDDEN)  # type: ignore[attr-defined]
    policy_values(hidden, weight, labels, entropy_gradient=True).sum().backward()
    assert weight.grad is None and weight.grad_added_to_main_grad  # type: ignore[attr-defined]
    assert error(weight.main_grad - 1, expected) < 1e-5  # type: ignore[attr-defined]


@pytest.mark.processes  # the C++ compiler
@pytest.mark.parametrize("small_chunks", ["gpu"], indirect=True)
def test_compiled_values_and_gradients() -> None:
    """Of two lengths."""
    for tokens in (12, 25):
        hidden, weight, _, labels = inputs(tokens=tokens)
        shard = VocabShard(softcap=3.0, temperature=0.7)
        expected = policy_values(hidden, weight, labels, shard, entropy_gradient=True)
        expected_gradients = torch.autograd.grad(expected.sum(), (hidden, weight))
        set_compile(True, device="cpu")
        try:
            values = policy_values(hidden, weight, labels, shard, entropy_gradient=True)
            gradients = torch.autograd.grad(values.sum(), (hidden, weight))
        finally:
            set_compile(False)
        assert error(values, expected) < 1e-6
        assert max(error(*pair) for pair in zip(gradients, expected_gradients, strict=True)) < 2e-6


def test_no_loss_tokens() -> None:
    hidden, weight, _, labels = inputs(tokens=0)
    values = policy_values(hidden, weight, labels, entropy_gradient=True)
    assert values.shape == (2, 0)
    (gradient,) = torch.autograd.grad(values.sum(), weight)
    assert not gradient.any()


def test_large_logits_stay_finite() -> None:
    """The probability of one token is 1, and the entropy 0."""
    hidden, weight, _, labels = inputs()
    values = policy_values(hidden * 1e4, weight, labels, entropy_gradient=True)
    gradients = torch.autograd.grad(values.sum(), (hidden, weight))
    assert values.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)
    assert values[1].abs().max() < 1e-3


def test_bf16_is_no_worse_than_torch_in_bf16() -> None:
    """Over logits in bf16."""
    hidden, weight, _, labels = inputs(torch.bfloat16)
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    zeros = torch.zeros(VOCAB)
    expected = expected_values(*wide, zeros, labels)
    theirs = expected_values(hidden, weight, zeros.bfloat16(), labels)
    values = policy_values(hidden, weight, labels, entropy_gradient=True)
    assert error(values, expected) <= error(theirs, expected)
    results = torch.autograd.grad(values.sum(), (hidden, weight))
    others = torch.autograd.grad(theirs.float().sum(), (hidden, weight))
    exact = torch.autograd.grad(expected.sum(), wide)
    for result, other, gradient in zip(results, others, exact, strict=True):
        assert error(result, gradient) < max(1.5 * error(other, gradient), 1e-6)
