"""The fused projection and cross entropy equal the separate ones, without their memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import TopPLogitsWarper

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.loss import cross_entropy_cpu, cross_entropy_gpu
from isthmus.engine.loss import linear_cross_entropy as module
from isthmus.engine.loss.cross_entropy_cpu import Smoothing
from isthmus.engine.loss.linear_cross_entropy import (
    TokenSampling,
    VocabShard,
    linear_cross_entropy,
    token_cross_entropies,
    token_scores,
)
from isthmus.engine.loss.objective import NextTokenAccuracy
from unit.engine.recorder import Recorder

VOCAB, HIDDEN = 300, 16


def inputs(tokens: int, dtype: torch.dtype, *, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = (torch.randn(tokens, HIDDEN) * scale).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCAB, (tokens,))


def ours(hidden: Tensor, weight: Tensor, labels: Tensor, num_rows: int = VOCAB) -> tuple[Tensor, ...]:
    loss = linear_cross_entropy(hidden, weight, labels, VocabShard(rows=num_rows))
    return loss, *torch.autograd.grad(loss * 3, (hidden, weight))


def exact(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    wide_hidden, wide_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    loss = torch.nn.functional.cross_entropy(wide_hidden @ wide_weight.t(), labels, reduction="sum")
    return loss, *torch.autograd.grad(loss * 3, (wide_hidden, wide_weight))


def error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.fixture(params=["cpu", "gpu"])
def small_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of ten tokens, computed as on a CPU or as on a GPU."""
    monkeypatch.setattr(cross_entropy_cpu, "CHUNK_ELEMENTS", 10 * VOCAB)
    monkeypatch.setattr(cross_entropy_cpu, "BLOCK_ELEMENTS", 4 * VOCAB)
    monkeypatch.setattr(cross_entropy_gpu, "chunk_elements", lambda _device: 10 * VOCAB)
    if request.param == "gpu":
        monkeypatch.setattr(module, "cross_entropy_cpu", cross_entropy_gpu)


@pytest.mark.parametrize("tokens", [1, 10, 37])
@pytest.mark.usefixtures("small_chunks")
def test_values_and_gradients_over_several_chunks(tokens: int) -> None:
    arguments = inputs(tokens, torch.float32)
    for got, expected in zip(ours(*arguments), exact(*arguments), strict=True):
        assert error(got, expected) < 1e-6


def test_one_chunk_is_enough_for_few_tokens() -> None:
    arguments = inputs(37, torch.float32)
    for got, expected in zip(ours(*arguments), exact(*arguments), strict=True):
        assert error(got, expected) < 1e-6


@pytest.mark.usefixtures("small_chunks")
def test_capped_logits() -> None:
    hidden, weight, labels = inputs(37, torch.float32)
    loss = linear_cross_entropy(hidden, weight, labels, VocabShard(softcap=3.0))
    wide_hidden, wide_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    logits = 3 * torch.tanh(wide_hidden @ wide_weight.t() / 3)
    expected_values = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    assert error(loss, expected_values) < 1e-6
    expected = torch.autograd.grad(expected_values * 3, (wide_hidden, wide_weight))
    for mine, theirs in zip(torch.autograd.grad(loss * 3, (hidden, weight)), expected, strict=True):
        assert error(mine, theirs) < 1e-6


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_label_smoothing_equals_torch(dtype: torch.dtype, softcap: float | None) -> None:
    """Over the rows without padding; float16 loss scales and per-token factors apply to all of it."""
    hidden, weight, labels = inputs(37, dtype)
    padded = torch.cat((weight, torch.full((5, HIDDEN), 100.0, dtype=dtype))).detach().requires_grad_()
    wide_hidden, wide_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    logits = wide_hidden @ wide_weight.t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected_values = torch.nn.functional.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)
    factors, scale = torch.linspace(-2, 3, 37), torch.tensor(8.0)
    expected = torch.autograd.grad(expected_values.sum() * 8, (wide_hidden, wide_weight), retain_graph=True)
    weighted = torch.autograd.grad((expected_values * factors).sum(), (wide_hidden, wide_weight))
    shard = VocabShard(rows=VOCAB, softcap=softcap, smoothing=Smoothing(0.1, 0.1 / VOCAB))
    limit = 2e-6 if dtype == torch.float32 else 0.02
    loss = linear_cross_entropy(hidden, padded, labels, shard, grad_scale=scale)
    assert error(loss, expected_values.sum()) < limit / 2
    for mine, theirs in zip(torch.autograd.grad(loss * scale, (hidden, padded)), expected, strict=True):
        assert error(mine[:VOCAB], theirs) < limit and not mine[VOCAB:].any()
    result = token_cross_entropies(hidden, padded, labels, shard)
    assert error(result, expected_values) < limit
    for mine, theirs in zip(torch.autograd.grad((result * factors).sum(), (hidden, padded)), weighted, strict=True):
        assert error(mine[:VOCAB], theirs) < limit
    with torch.no_grad():
        assert error(linear_cross_entropy(hidden, padded, labels, shard), expected_values.sum()) < limit / 2


@pytest.mark.usefixtures("small_chunks")
def test_a_loss_scale_saves_small_gradients_in_fp16() -> None:
    """Far from the label the probabilities are below the smallest float16; times the scale they are not."""
    hidden, weight, labels = inputs(37, torch.float16, scale=3.0)
    expected = [wide / 3 for wide in exact(hidden, weight, labels)[1:]]
    errors = {}
    for scale in (1.0, 4096.0):
        factor = torch.tensor(scale)
        loss = linear_cross_entropy(hidden, weight, labels, grad_scale=factor) * factor
        result = torch.autograd.grad(loss, (hidden, weight))
        errors[scale] = [error(mine.float() / scale, theirs) for mine, theirs in zip(result, expected, strict=True)]
    assert all(scaled < 2**-9 for scaled in errors[4096.0])
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]
    loss = linear_cross_entropy(hidden, weight, labels, grad_scale=torch.tensor(64.0))
    with pytest.raises(RuntimeError, match="a loss gradient of 1 times the loss scale"):
        loss.backward()
    (loss * 64).backward()
    assert error(weight.main_grad / 64, expected[1]) < 2**-9  # type: ignore[attr-defined]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_per_token_losses(softcap: float | None) -> None:
    """Each loss has its own factor, known after the forward pass; the projection gradient is added to main_grad."""
    hidden, weight, labels = inputs(37, torch.float32)
    factors = torch.linspace(-2, 3, 37)
    wide_hidden, wide_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    logits = wide_hidden @ wide_weight.t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected_values = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    expected = torch.autograd.grad((expected_values * factors).sum(), (wide_hidden, wide_weight))
    result = token_cross_entropies(hidden, weight, labels, VocabShard(softcap=softcap))
    assert error(result, expected_values) < 1e-6
    gradients = torch.autograd.grad((result * factors).sum(), (hidden, weight))
    assert max(error(*pair) for pair in zip(gradients, expected, strict=True)) < 1e-6
    weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]
    (token_cross_entropies(hidden, weight, labels, VocabShard(softcap=softcap)) * factors).sum().backward()
    assert weight.grad is None and error(weight.main_grad, expected[1]) < 1e-6  # type: ignore[attr-defined]


def test_per_token_losses_in_fp16() -> None:
    """The loss scale comes with the gradient and is multiplied in float32, which saves the small ones."""
    hidden, weight, labels = inputs(37, torch.float16, scale=3.0)
    expected = [wide / 3 for wide in exact(hidden, weight, labels)[1:]]
    result = torch.autograd.grad(token_cross_entropies(hidden, weight, labels).sum() * 4096, (hidden, weight))
    assert all(error(mine.float() / 4096, theirs) < 2**-9 for mine, theirs in zip(result, expected, strict=True))


@pytest.mark.usefixtures("small_chunks")
def test_bf16_is_no_worse_than_torch_in_bf16() -> None:
    arguments = inputs(37, torch.bfloat16)
    hidden, weight, labels = arguments
    loss = torch.nn.functional.cross_entropy((hidden @ weight.t()).float(), labels, reduction="sum")
    theirs = (loss, *torch.autograd.grad(loss * 3, (hidden, weight)))
    for got, other, expected in zip(ours(*arguments), theirs, exact(*arguments), strict=True):
        assert error(got, expected) < max(1.5 * error(other, expected), 1e-6)


@pytest.mark.usefixtures("small_chunks")
def test_sharp_and_large_logits_stay_finite() -> None:
    arguments = inputs(37, torch.float32, scale=1e3)
    for got, expected in zip(ours(*arguments), exact(*arguments), strict=True):
        assert got.isfinite().all()
        assert error(got, expected) < 1e-5


def test_padding_rows_are_ignored() -> None:
    hidden, weight, labels = inputs(37, torch.float32)
    padded = torch.cat((weight, torch.full((5, HIDDEN), 100.0))).detach().requires_grad_()
    loss, grad_hidden, grad_weight = ours(hidden, padded, labels)
    expected = exact(hidden, weight, labels)
    assert error(loss, expected[0]) < 1e-6
    assert error(grad_hidden, expected[1]) < 1e-6
    assert error(grad_weight[:VOCAB], expected[2]) < 1e-6
    assert not grad_weight[VOCAB:].any()


def test_the_gradient_is_added_to_main_grad() -> None:
    hidden, weight, labels = inputs(37, torch.float32)
    weight.main_grad = torch.ones(VOCAB, HIDDEN)
    weight.grad_added_to_main_grad = False
    loss = linear_cross_entropy(hidden, weight, labels, VocabShard(rows=VOCAB))
    loss.backward()
    assert weight.grad is None and weight.grad_added_to_main_grad
    _, grad_hidden, grad_weight = exact(hidden, weight, labels)
    assert error(weight.main_grad - 1, grad_weight / 3) < 1e-6
    assert hidden.grad is not None and error(hidden.grad, grad_hidden / 3) < 1e-6


def test_another_loss_gradient_is_refused() -> None:
    hidden, weight, labels = inputs(5, torch.float32)
    weight.main_grad = torch.zeros(VOCAB, HIDDEN)
    loss = linear_cross_entropy(hidden, weight, labels)
    with pytest.raises(RuntimeError, match="loss gradient of 1"):
        (loss * 3).backward()


@pytest.mark.parametrize(("tokens", "sizes"), [(0, []), (9, [9]), (10, [10]), (11, [6, 5]), (37, [10, 10, 10, 7])])
def test_chunks_have_similar_sizes(tokens: int, sizes: list[int]) -> None:
    assert [end - start for start, end in module.chunk_bounds(tokens, VOCAB, 10 * VOCAB)] == sizes


@pytest.mark.usefixtures("small_chunks")
@torch.no_grad()
def test_ranks_with_padding_have_the_same_chunks() -> None:
    """They exchange values once a chunk."""
    hidden, weight, labels = inputs(15, torch.float32)
    sizes = [
        [len(part) for part in VocabShard(rows=rows).chunk_losses(hidden, weight, labels % 200)] for rows in (200, 300)
    ]
    assert sizes == [[8, 7]] * 2


def test_no_loss_tokens_give_zero() -> None:
    arguments = inputs(0, torch.float32)
    loss, grad_hidden, grad_weight = ours(*arguments)
    assert loss.item() == 0
    assert grad_hidden.shape == (0, HIDDEN) and not grad_weight.any()


@pytest.mark.slow_cases("cpu-dtype1", "gpu-dtype0", "gpu-dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("small_chunks")
def test_logits_of_all_tokens_are_never_materialized(dtype: torch.dtype) -> None:
    arguments = inputs(200, dtype)
    with Recorder() as seen:
        ours(*arguments)
    # The gradient of the projection is the one large tensor that has to be there.
    assert seen.largest(torch.float32) <= max(10 * VOCAB, VOCAB * HIDDEN) < 200 * VOCAB
    assert seen.largest(torch.bfloat16) <= max(10 * VOCAB, VOCAB * HIDDEN)


def test_the_recorder_sees_materialized_logits() -> None:
    hidden, weight, labels = inputs(200, torch.bfloat16)
    with Recorder() as seen:
        torch.nn.functional.cross_entropy((hidden @ weight.t()).float(), labels).backward()
    assert seen.largest(torch.float32) == 200 * VOCAB


@pytest.mark.usefixtures("small_chunks")
def test_evaluation_computes_no_gradient() -> None:
    hidden, weight, labels = inputs(37, torch.float32)
    expected = exact(hidden, weight, labels)[0]
    with torch.no_grad(), Recorder() as seen:
        loss = linear_cross_entropy(hidden, weight, labels, VocabShard(rows=VOCAB))
    assert error(loss, expected) < 1e-6
    assert not any(name.startswith("addmm") for name, _ in seen.calls)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_scores_are_losses_and_most_probable_tokens(softcap: float | None) -> None:
    hidden, weight, labels = inputs(37, torch.float32)
    logits = hidden @ weight[:290].t()
    labels = torch.where(torch.arange(37) % 3 == 0, logits.argmax(1), labels % 290)
    shard = VocabShard(rows=290, softcap=softcap)
    losses, tokens = token_scores(hidden, weight, labels, shard)
    assert torch.equal(tokens.long(), logits.argmax(1))
    assert torch.equal(losses.float(), token_cross_entropies(hidden, weight, labels, shard))

    mask = torch.tensor([True] * 37 + [False])
    sample = torch.zeros(38, dtype=torch.int64)
    batch = PackedBatch(
        input_ids=sample, position_ids=sample, lengths=(38,), labels=torch.cat([labels, sample[:1]]), loss_mask=mask
    )
    objective = NextTokenAccuracy()
    result = objective.loss(torch.stack([losses, tokens]), batch, loss_tokens=37, mtp_tokens=0, mtp_weight=0.0)
    metrics = objective.metrics({name: float(value) for name, value in result.sums.items()}, 37)
    assert metrics["mean_token_accuracy"] == pytest.approx((logits.argmax(1) == labels).float().mean().item())
    assert metrics["perplexity"] == pytest.approx(losses.mean().exp().item()) and result.count == 37
    assert float(result.loss_sum) == pytest.approx(linear_cross_entropy(hidden, weight, labels, shard).item())


def test_random_tokens_follow_the_softmax() -> None:
    """Over many positions with the same logits."""
    torch.manual_seed(0)
    logits, size = torch.tensor([2.0, 0.0, 1.0, -1.0, 0.5]), 20_000
    hidden, weight = torch.ones(size, 1), logits[:, None]
    sampling = TokenSampling(0.7, torch.randint(-(2**62), 2**62, (size,)))
    tokens = token_scores(hidden, weight, torch.zeros(size, dtype=torch.int64), sampling=sampling)[1].long()
    shares = tokens.bincount(minlength=5) / size
    assert (shares - (logits / 0.7).softmax(0)).abs().max() < 0.012


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_random_tokens_invert_the_cumulative_probabilities(temperature: float) -> None:
    """Over several blocks of tokens, of which the last is not full."""
    size = 4_000
    hidden, weight, _ = inputs(size, torch.float32, scale=0.3)
    sampling = TokenSampling(temperature, torch.arange(size) << 20)
    tokens = token_scores(hidden, weight, None, sampling=sampling)[1].long()
    sums = (hidden.double() @ weight.double().t() / temperature).softmax(1).cumsum(1)
    target = sampling.uniform()
    before = torch.where(tokens > 0, sums.gather(1, (tokens - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    assert ((target - before).min() > -1e-6) and ((sums.gather(1, tokens[:, None])[:, 0] - target).min() > -1e-6)
    assert len(tokens.unique()) > 250


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
def test_random_tokens_of_a_nucleus() -> None:
    """As from the softmax of the logits that transformers keeps."""
    size, temperature = 5_000, 0.7
    logits = torch.cat([torch.tensor([2.0, 0.0, 1.0, -1.0, 0.5]), torch.full((VOCAB - 5,), -20.0)])
    scores = TopPLogitsWarper(0.9)(torch.empty(0), logits[None] / temperature)[0]
    assert scores.isfinite().sum() == 3
    sampling = TokenSampling(temperature, torch.arange(size) << 32, top_p=0.9)
    tokens = token_scores(torch.ones(size, 1), logits[:, None], None, sampling=sampling)[1].long()
    assert ((tokens.bincount(minlength=VOCAB) / size) - scores.softmax(0)).abs().max() < 0.02


def test_the_most_probable_token_is_in_every_nucleus() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0])
    sampling = TokenSampling(1.0, torch.arange(100), top_p=1e-6)
    assert token_scores(torch.ones(100, 1), logits[:, None], None, sampling=sampling)[1].unique().tolist() == [1]


@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_losses_of_random_tokens_are_at_their_temperature(top_p: float) -> None:
    """Of the distribution over all tokens, also with a nucleus."""
    hidden, weight, _ = inputs(37, torch.float32)
    shard = VocabShard(softcap=3.0)
    losses, tokens = token_scores(hidden, weight, None, shard, sampling=TokenSampling(0.7, torch.arange(37), top_p))
    logits = 3 * torch.tanh(hidden @ weight.t() / 3) / 0.7
    expected = torch.nn.functional.cross_entropy(logits, tokens.long(), reduction="none")
    assert error(losses, expected) < 1e-6


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.usefixtures("small_chunks")
def test_a_bias_of_the_logits(per_token: bool) -> None:
    """Of a weight with padded rows, over several chunks."""
    hidden, weight, labels = inputs(37, torch.float32)
    bias = torch.randn(VOCAB, requires_grad=True)
    padded, padded_bias = (torch.cat([item, item[:8]]) for item in (weight, bias))
    shard = VocabShard(rows=VOCAB, softcap=3.0, bias=padded_bias)
    losses = token_cross_entropies if per_token else linear_cross_entropy
    result = torch.autograd.grad(losses(hidden, padded, labels, shard).sum() * 3, (hidden, weight, bias))
    logits = torch.tanh((hidden @ weight.t() + bias) / 3.0) * 3.0
    expected_values = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") * 3
    for got, expected in zip(result, torch.autograd.grad(expected_values, (hidden, weight, bias)), strict=True):
        assert error(got, expected) < 1e-5
