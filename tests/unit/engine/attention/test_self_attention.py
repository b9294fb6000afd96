"""Attention over packed samples against the formula, and bounds on what it allocates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.attention.backends import blocks
from isthmus.engine.attention.backends.blocks import packed_attention, plan_stacks
from isthmus.engine.attention.backends.registry import BACKENDS
from isthmus.engine.attention.backends.sdpa import sdpa_attention
from isthmus.engine.attention.self_attention import CoreAttention
from isthmus.engine.layers.dropout import AttentionDropout, drop, dropout_keys, keep_mask
from isthmus.engine.parallel.context_parallel import Spans, local_tokens
from isthmus.platforms.torch_features import SCALED_MM
from unit.engine.recorder import Recorder

HEADS, CHANNELS = 4, 16

WAYS = [packed_attention, sdpa_attention]


SIZES = {
    "BLOCK_QUERIES": (6, 4, 96),
    "KEYS_MULTIPLE": (4, 4, 64),
    "ROWS_MULTIPLE": ({torch.float64: 4}, {}, {torch.float64: 32}),
    "MAX_STACKED": ({}, {torch.float64: 5}, {}),
    "MAX_SCORES": (300, 1 << 20, 3 << 18),
}


@pytest.fixture(params=range(3), ids=["small-blocks", "nothing-filled-up", "blocks"])
def block_sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, values in SIZES.items():
        monkeypatch.setattr(blocks, name, values[request.param])
    plan_stacks.cache_clear()
    yield
    plan_stacks.cache_clear()


def inputs(tokens: int, groups: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = ((groups, HEADS // groups), (groups,), (groups,))
    q, k, v = (torch.randn(tokens, *heads, CHANNELS, dtype=dtype) for heads in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    window: int | None,
    *,
    scale: float = CHANNELS**-0.5,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    weights: Tensor | float = 1.0,
) -> Tensor:
    """All scores of the packed sequence, then a mask: same sample, not later, within the window."""
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(sample))
    distance = place[:, None] - place[None, :]
    seen = (sample[:, None] == sample[None, :]) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    share = q.size(2)
    q, k, v = q.flatten(1, 2), k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.einsum("tnd,snd->nts", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((sinks[:, None, None].expand(-1, scores.size(1), 1), scores), -1)
    probabilities = scores.softmax(-1)[..., -len(sample) :] * weights
    return torch.einsum("nts,snd->tnd", probabilities, v).unflatten(1, (-1, share))


LENGTHS = [(20,), (9, 1, 4, 6), (8, 12), (1, 1, 18), (5, 5, 5, 5), (4, 8, 8)]
WINDOWS = [None, 1, 3, 8, 100]
# Each packing with three of the windows; each window meets each number of query groups.
CASES = [
    (lengths, WINDOWS[(number + 2 * turn) % 5], (1, 2, 4)[(number + turn) % 3])
    for number, lengths in enumerate(LENGTHS)
    for turn in range(3)
]


@pytest.mark.parametrize(("lengths", "window", "groups"), CASES)
@pytest.mark.usefixtures("block_sizes")
def test_values_and_gradients_in_blocks(lengths: tuple[int, ...], window: int | None, groups: int) -> None:
    check_values_and_gradients(packed_attention, lengths, window, groups)


@pytest.mark.parametrize(("lengths", "window", "groups"), CASES)
def test_values_and_gradients_of_the_kernel(lengths: tuple[int, ...], window: int | None, groups: int) -> None:
    check_values_and_gradients(sdpa_attention, lengths, window, groups)


def check_values_and_gradients(
    attend: Callable[..., Tensor], lengths: tuple[int, ...], window: int | None, groups: int
) -> None:
    tensors = inputs(20, groups)
    upstream = torch.randn(20, groups, HEADS // groups, CHANNELS, dtype=torch.float64)
    out, expected = attend(*tensors, lengths, window), reference(*tensors, lengths, window)
    assert torch.allclose(out, expected)
    got = torch.autograd.grad(out, tensors, upstream)
    for mine, theirs in zip(got, torch.autograd.grad(expected, tensors, upstream), strict=True):
        assert torch.allclose(mine, theirs)


@pytest.mark.parametrize("kwargs", [{"scale": 0.7}, {"softcap": 0.5}, {"sinks": True}, {"softcap": 2.0, "sinks": True}])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.usefixtures("block_sizes")
def test_scores_scaled_capped_and_with_sinks(kwargs: dict[str, Any], window: int | None) -> None:
    tensors = inputs(20, 2)
    changed = dict(kwargs)
    if "sinks" in kwargs:
        changed["sinks"] = torch.randn(HEADS, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(20, 2, HEADS // 2, CHANNELS, dtype=torch.float64)
    lengths = (9, 1, 4, 6)
    out, expected = (attend(*tensors, lengths, window, **changed) for attend in (packed_attention, reference))
    assert torch.allclose(out, expected)
    assert not torch.allclose(out, reference(*tensors, lengths, window), atol=1e-3)
    leaves = (*tensors, changed["sinks"]) if "sinks" in kwargs else tensors
    got = torch.autograd.grad(out, leaves, upstream)
    for mine, theirs in zip(got, torch.autograd.grad(expected, leaves, upstream), strict=True):
        assert torch.allclose(mine, theirs)


@pytest.mark.parametrize("spans", [None, ((0, 3), (7, 20)), ((5, 12),)], ids=["whole", "cp", "cp-inside"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.usefixtures("block_sizes")
def test_dropout_of_probabilities(window: int | None, spans: Spans | None) -> None:
    """Masks are a function of head, query and key, however samples are stacked and queries are distributed."""
    q, k, v = inputs(20, 2)
    sinks = torch.randn(HEADS, dtype=torch.float64, requires_grad=True)
    lengths, rate = (9, 1, 4, 6), 0.3
    batch = replace(
        PackedBatch.for_inference([torch.zeros(n, dtype=torch.int64) for n in lengths]), sample_ids=(3, 1, 0, 2)
    )
    batch = replace(batch, dropout=dropout_keys(batch, seed=1, step=2))
    full = AttentionDropout(rate, 1, 8, batch)
    rows = full.query_keys(2, HEADS // 2).unflatten(1, (20, -1)).transpose(1, 2).reshape(HEADS, 20, 1)
    mask = keep_mask(rows, full.key_keys(1).transpose(1, 2), rate)
    weights = drop(torch.ones(HEADS, 20, 20, dtype=torch.float64), mask, rate)
    assert 0.6 < weights.count_nonzero() / weights.numel() < 0.8
    local_dropout = replace(full, batch=replace(batch, spans=spans))
    changed: dict[str, Any] = {"sinks": sinks, "softcap": 2.0}
    out = packed_attention(local_tokens(q, spans), k, v, lengths, window, spans=spans, dropout=local_dropout, **changed)
    expected = local_tokens(reference(q, k, v, lengths, window, weights=weights, **changed), spans)
    assert torch.allclose(out, expected)
    upstream = torch.randn(expected.shape, dtype=torch.float64)
    leaves = (q, k, v, sinks)
    got = torch.autograd.grad(out, leaves, upstream)
    for mine, theirs in zip(got, torch.autograd.grad(expected, leaves, upstream), strict=True):
        assert torch.allclose(mine, theirs)


def test_sdpa_with_a_scale() -> None:
    tensors = inputs(20, 2)
    for scale, window in ((0.7, None), (0.1, 4)):
        out = sdpa_attention(*tensors, (9, 11), window, scale=scale)
        assert torch.allclose(out, reference(*tensors, (9, 11), window, scale=scale))


def test_bf16_sinks_get_a_bf16_gradient() -> None:
    lengths = (22, 18)  # one above the other
    q, k, v = inputs(40, 2, torch.bfloat16)
    sinks = torch.randn(HEADS, dtype=torch.bfloat16, requires_grad=True)
    packed_attention(q, k, v, lengths, sinks=sinks).sum().backward()
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v, sinks)]
    reference(*wide[:3], lengths, None, sinks=wide[3]).sum().backward()
    assert sinks.grad is not None and wide[3].grad is not None
    assert sinks.grad.dtype == torch.bfloat16
    assert (sinks.grad.double() - wide[3].grad).abs().max() < 0.02 * wide[3].grad.abs().max()


def test_values_wider_than_keys() -> None:
    q, k, v = inputs(20, 2)
    wide = torch.cat((v, -v), dim=-1)
    out = packed_attention(q, k, wide, (9, 11))
    assert torch.allclose(out, torch.cat((reference(q, k, v, (9, 11), None), -reference(q, k, v, (9, 11), None)), -1))


@pytest.mark.parametrize("backend", ["blocks", "sdpa"])
def test_the_layer_has_its_window_and_the_backend_of_the_config(backend: str) -> None:
    tensors = inputs(20, 2)
    config = SimpleNamespace(
        attention=backend,
        recomputed=frozenset(),
        attention_dropout=0.0,
    )
    for window in (4, None):
        layer = CoreAttention(config, window=window)
        assert layer.backend is BACKENDS[backend]
        assert torch.allclose(
            layer(*tensors, PackedBatch.for_inference([torch.zeros(20, dtype=torch.int64)])),
            reference(*tensors, (20,), window).flatten(1),
        )


old_sdpa = pytest.mark.skipif(
    SCALED_MM is None, reason=f"SDPA of torch {torch.__version__} has no CPU kernel for shared keys and masks"
)


@old_sdpa
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("attend", WAYS)
def test_shared_keys_and_values_are_not_copied_for_each_head(attend: Callable[..., Tensor], window: int | None) -> None:
    q, k, v = inputs(40, 2, torch.float32)
    attend(q, k, v, (30, 10), window)  # masks are made once
    with Recorder() as seen:
        attend(q, k, v, (30, 10), window)
    assert not {name for name, _ in seen.calls} & {"repeat", "repeat_interleave", "expand"}
    assert all(shape != (40, HEADS, CHANNELS) for name, shapes in seen.calls if name != "split" for shape in shapes[1:])


@old_sdpa
@pytest.mark.slow_cases("packed_attention")
@pytest.mark.parametrize("attend", WAYS)
def test_no_quadratic_allocation(attend: Callable[..., Tensor]) -> None:
    q, k, v = inputs(1536, 2, torch.float32)
    with Recorder() as seen:
        attend(q, k, v, (1500, 36)).sum().backward()
    assert seen.largest(torch.float32) <= HEADS * 96 * 1536 < 1500 * 1500
    assert seen.largest(torch.bool) <= 96 * 1536


def test_scores_are_not_saved() -> None:
    remaining: list[int] = []
    q, k, v = inputs(600, 2, torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: remaining.append(tensor.numel()) or tensor, lambda x: x
    ):
        packed_attention(q, k, v, (600,))
    assert max(remaining) == 600 * HEADS * CHANNELS


@old_sdpa
def test_a_window_longer_than_the_sample_needs_no_mask() -> None:
    tensors = inputs(40, 2, torch.float32)
    with Recorder() as seen:
        sdpa_attention(*tensors, (30, 10), 30)
    assert seen.largest(torch.bool) == 0


@pytest.mark.parametrize("attend", WAYS)
@pytest.mark.usefixtures("block_sizes")
def test_one_sample_does_not_change_another(attend: Callable[..., Tensor]) -> None:
    q, k, v = (tensor.detach() for tensor in inputs(20, 2))
    before = attend(q, k, v, (8, 12))
    for tensor in (q, k, v):
        tensor[:8] = torch.randn_like(tensor[:8])
    after = attend(q, k, v, (8, 12))
    assert torch.equal(before[8:], after[8:])
    assert not torch.allclose(before[:8], after[:8])


@pytest.mark.parametrize("attend", WAYS)
def test_lengths_must_sum_to_the_tokens(attend: Callable[..., Tensor]) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        attend(*inputs(20, 2), (8, 11))


def test_samples_of_similar_length_share_matmuls() -> None:
    """Eight samples of one length take as many matmuls as one, as long as their scores fit the cache."""
    matmuls = []
    for lengths in ((64,), (64,) * 8, (40, 64, 50, 61)):
        tensors = inputs(sum(lengths), 2, torch.float32)
        with Recorder() as seen:
            packed_attention(*tensors, lengths)
        matmuls.append([name for name, _ in seen.calls if name in ("bmm", "baddbmm")])
    assert matmuls[0] == matmuls[1] == matmuls[2] and matmuls[0]


def test_blocks_have_few_shapes() -> None:
    lengths = tuple(torch.randint(20, 700, (40,), generator=torch.Generator().manual_seed(0)).tolist())
    stacks = plan_stacks(lengths, None, (2, 2), torch.bfloat16)
    shapes = {(block.end - block.start, block.last - block.first) for stack in stacks for block in stack.blocks}
    assert len({keys for _, keys in shapes} - {96}) <= 1 + (700 + 96) // 64
    assert {queries for queries, _ in shapes} <= {32, 64, 96}
    assert len(stacks) < 8 and len({len(stack.ranges) for stack in stacks}) > 1
