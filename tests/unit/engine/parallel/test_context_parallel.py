"""Partition of packed sequences over context parallel ranks; attention of each part against the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.attention.backends import blocks
from isthmus.engine.attention.backends.blocks import packed_attention, plan_stacks
from isthmus.engine.attention.backends.sdpa import sdpa_attention
from isthmus.engine.attention.rope import frequency_sets, rotary_tables
from isthmus.engine.parallel import context_parallel
from isthmus.engine.parallel.context_parallel import local_tokens, partition
from isthmus.families.registry import family_for

PACKINGS: dict[str, tuple[int, ...]] = {
    "one sample": (8192,),
    "a long one first": (4096, *(256,) * 16),
    "a long one last": (*(256,) * 16, 4096),
    "a long one in the middle": (1000, 5192, 2000),
    "halves": (4096, 4096),
    "thirds": (2731, 2731, 2730),
    "short ones": (64,) * 128,
}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(context_parallel, "MIN_CHUNK", 2)
    monkeypatch.setattr(blocks, "BLOCK_QUERIES", 6)
    monkeypatch.setattr(blocks, "KEYS_MULTIPLE", 4)
    for cached in (partition, plan_stacks):
        cached.cache_clear()
    yield
    for cached in (partition, plan_stacks):
        cached.cache_clear()


@pytest.mark.parametrize(("chunk", "ranks"), [(1, 2), (2, 8), (95, 3), (96, 4), (97, 2), (700, 8), (10_001, 3)])
def test_every_token_has_one_rank_and_ranks_have_equal_tokens(chunk: int, ranks: int) -> None:
    ranks_spans = partition(2 * ranks * chunk, ranks)
    tokens = [[token for start, end in spans for token in range(start, end)] for spans in ranks_spans]
    assert [len(local_tokens) for local_tokens in tokens] == [2 * chunk] * ranks
    assert sorted(token for local_tokens in tokens for token in local_tokens) == list(range(2 * ranks * chunk))
    assert all(local_tokens == sorted(local_tokens) for local_tokens in tokens)


@pytest.mark.parametrize("tokens", [0, 2, 6, 10])
def test_a_length_that_cannot_be_partitioned_is_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match="2 x 2 equal chunks"):
        partition(tokens, 2)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("lengths", PACKINGS.values(), ids=PACKINGS)
def test_attention_work_is_balanced(lengths: tuple[int, ...], ranks: int) -> None:
    """A token costs as many keys as it sees; the sum over a rank's tokens is at most a tenth above the mean."""
    seen = torch.cat([torch.arange(1, length + 1) for length in lengths])
    work = torch.tensor([local_tokens(seen, spans).sum() for spans in partition(len(seen), ranks)]).double()
    assert work.max() <= 1.1 * work.mean()


@pytest.mark.parametrize("attend", [packed_attention, sdpa_attention])
@pytest.mark.parametrize(
    ("lengths", "window", "ranks"),
    [
        ((48,), None, 2), ((48,), 13, 4), ((9, 1, 4, 34), 1, 2), ((9, 1, 4, 34), None, 4), ((9, 1, 4, 34), 5, 4),
        ((1, 1, 46), 100, 2), ((1, 1, 46), 5, 4), ((24, 24), None, 4), ((24, 24), 13, 2), ((24, 24), 1, 4),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("small_chunks")
def test_parts_attend_like_the_whole(
    attend: Callable[..., Tensor], lengths: tuple[int, ...], window: int | None, ranks: int
) -> None:
    _compare(attend, lengths, window, ranks, {})


@pytest.mark.parametrize("kwargs", [{"scale": 0.7}, {"softcap": 0.5}, {"sinks": True}])
@pytest.mark.usefixtures("small_chunks")
def test_parts_attend_like_the_whole_with_score_options(kwargs: dict[str, Any]) -> None:
    sinks = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    _compare(packed_attention, (9, 1, 4, 34), 7, 2, {**kwargs, "sinks": sinks} if "sinks" in kwargs else kwargs)


def _compare(
    attend: Callable[..., Tensor], lengths: tuple[int, ...], window: int | None, ranks: int, kwargs: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    shapes = ((2, 2, 8), (2, 8), (2, 6))
    q, k, v = (torch.randn(48, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    upstream = torch.randn(48, 2, 2, 6, dtype=torch.float64)
    inputs = [q, k, v, *([kwargs["sinks"]] if "sinks" in kwargs else [])]
    full = attend(q, k, v, lengths, window, **kwargs)
    expected = torch.autograd.grad(full, inputs, upstream)
    got = [torch.zeros_like(tensor) for tensor in inputs]
    for spans in partition(48, ranks):
        part = attend(local_tokens(q, spans), k, v, lengths, window, spans=spans, **kwargs)
        assert torch.allclose(part, local_tokens(full, spans), rtol=0, atol=1e-12)
        for total, grad in zip(got, torch.autograd.grad(part, inputs, local_tokens(upstream, spans)), strict=True):
            total += grad
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("attend", [packed_attention, sdpa_attention])
def test_wrong_numbers_of_queries_are_refused(attend: Callable[..., Tensor]) -> None:
    tensors = [torch.zeros(16, *shape) for shape in ((1, 1, 4), (1, 4), (1, 4))]
    with pytest.raises(ValueError, match="expected 8 queries"):
        attend(*tensors, (16,), spans=((0, 4), (12, 16)))


def test_parts_have_the_rotary_tables_of_their_samples() -> None:
    """With LongRoPE they depend on the length of the whole sample, of which a rank has a part."""
    factors = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [4.0, 6.0, 8.0, 9.0]}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 77, "rms_norm_eps": 1e-6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16, **factors}
    lengths = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
    config = {"model_type": "phi3", **sizes, **heads, **lengths, "rope_parameters": rope}
    architecture = family_for(config).to_architecture(config)
    sets = frequency_sets(architecture)
    batch = PackedBatch.for_inference([torch.zeros(length, dtype=torch.int64) for length in (12, 20)])
    full = rotary_tables(architecture, sets, batch, torch.float32)
    for spans in partition(32, 2):
        local = replace(batch, position_ids=local_tokens(batch.position_ids, spans), spans=spans)
        assert torch.equal(rotary_tables(architecture, sets, local, torch.float32), local_tokens(full, spans))
