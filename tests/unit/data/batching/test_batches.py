"""Batches are a function of seed and step alone; every layout gets the same sequences."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import fields

import numpy as np
import pytest
import torch

from isthmus.data.batching.batches import Batches, BatchSettings, BatchShard, DocumentEnds
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.data.store import mixture
from isthmus.data.store.indexed_dataset import IndexedWriter, open_indexed, write_manifest
from isthmus.data.store.mixture import MixtureSet
from isthmus.data.store.sample_store import MockSamples, SampleStore
from isthmus.errors import DataError, UsageError


def store(n: int = 23, seed: int = 0) -> SampleStore:
    rng = random.Random(seed)
    samples = []
    for k in range(n):
        length = rng.randint(2, 9)
        # The first token is the sample's number, which identifies it in a batch.
        samples.append(([1000 + k] + [rng.randint(1, 99) for _ in range(length - 1)], [0] + [1] * (length - 1)))
    return SampleStore.from_samples(samples)


def seen(micro_batches: list[PackedBatch]) -> list[int]:
    return [int(i) - 1000 for mb in micro_batches for i in mb.input_ids[mb.position_ids == 0] if i >= 1000]


def make(s: SampleStore, **options) -> Batches:
    options = {"seq_length": 16, "micro_batch_size": 1, "global_batch_size": 4, "packing": False, **options}
    shares = options.pop("shares", ())
    settings, shard = (
        kind(**{field.name: options.pop(field.name) for field in fields(kind) if field.name in options})
        for kind in (BatchSettings, BatchShard)
    )
    return Batches(s, settings, shard, shares=shares, **options)


def test_samples_are_packed_end_to_end():
    s = SampleStore.from_samples([([5, 6, 7], [1, 0, 1]), ([8, 9], [0, 1])])
    (mb,) = make(s, packing=True, global_batch_size=1, pad_to_multiple_of=8).step(0)
    assert mb.input_ids.tolist() == [5, 6, 8, 0, 0, 0, 0, 0]
    assert mb.labels.tolist() == [0, 7, 9, 0, 0, 0, 0, 0]
    assert mb.loss_mask.tolist() == [False, True, True] + [False] * 5
    assert mb.position_ids.tolist() == [0, 1, 0, 0, 1, 2, 3, 4]
    assert (mb.lengths, mb.padding, mb.loss_tokens, mb.sample_ids) == ((2, 1, 5), 5, (1, 1, 0), (0, 1))
    assert (mb.sample_lengths, mb.num_tokens, mb.num_loss_tokens) == ((2, 1), 3, 2)
    assert [mb.input_ids.dtype, mb.labels.dtype, mb.position_ids.dtype] == [torch.int64] * 3
    assert mb.loss_mask.dtype == torch.bool
    (exact,) = make(s, packing=True, global_batch_size=1).step(0)
    assert (exact.lengths, exact.padding) == ((2, 1), 0)


@pytest.mark.parametrize("packing", [False, True])
def test_an_epoch_sees_each_sample_once_and_the_next_in_another_order(packing):
    s = store(24)
    b = make(s, packing=packing, global_batch_size=1)
    n = b.sequences_per_epoch
    assert b.steps_per_epoch == n
    epochs = [[x for k in range(n) for x in seen(b.step(e * n + k))] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(24))
    assert epochs[0] != epochs[1]
    if not packing:
        unshuffled = make(s, global_batch_size=1, shuffle=False)
        assert [x for k in range(48) for x in seen(unshuffled.step(k))] == [*range(24), *range(24)]


def test_the_order_is_pinned():
    """Another order would make a resumed run see some samples twice: change it only on purpose."""
    assert [seen(make(store(), seed=7).step(k)) for k in (0, 6)] == ORDER


def test_steps_can_be_requested_in_any_order():
    a, b = make(store(), packing=True), make(store(), packing=True)
    forward = [seen(a.step(k)) for k in range(12)]
    assert [seen(b.step(k)) for k in reversed(range(12))] == forward[::-1]
    assert [seen(make(store(), packing=True, seed=1).step(k)) for k in range(12)] != forward


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("micro", "dp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)])
def test_every_layout_gets_the_same_global_batch(packing, micro, dp):
    s = store()
    full = make(s, packing=packing)
    ranks = [make(s, packing=packing, micro_batch_size=micro, dp_rank=r, dp_size=dp) for r in range(dp)]
    for step in (0, 3, 7):
        expected = seen(full.step(step))
        parts = [rank.step(step) for rank in ranks]
        assert {len(part) for part in parts} == {4 // (micro * dp)} == {ranks[0].num_microbatches}
        dealt = [x for round_ in zip(*parts, strict=True) for mb in round_ for x in seen([mb])]
        assert dealt == expected


def contents(micro_batches: list[PackedBatch]) -> list[tuple[int, ...]]:
    """Each sample's tokens, without padding."""
    lines = [mb.input_ids.split(mb.lengths) for mb in micro_batches]
    return sorted(sample for line in lines for part in line if any(sample := tuple(part.tolist())))


SOURCES = {
    "one a line": (store, {}),
    "packed": (store, {"packing": True}),
    "buckets": (store, {"length_buckets": [4, 8, 16, 64]}),
    "packed into buckets": (store, {"packing": True, "length_buckets": [16, 64]}),
    "mixed": (
        store,
        {"shares": [MixtureSet("a", 10, 3.0), MixtureSet("b", 13, 1.0)], "packing": True, "length_buckets": [16, 64]},
    ),
    "made up": (lambda: MockSamples(seq_length=7, vocab_size=10**6, seed=5, count=23), {"shuffle": False}),
}


@pytest.mark.parametrize("source", SOURCES)
def test_resuming_in_another_layout_takes_the_same_samples(source):
    """What a step takes is a function of seed and consumed sequences alone; each sample is seen once an epoch."""
    samples, options = SOURCES[source]
    full = make(samples(), **options)
    steps = 3 * full.steps_per_epoch
    truth = [contents(full.step(k)) for k in range(steps)]
    layouts = [(1, 1), (2, 1), (1, 4), (2, 2), (4, 1)]
    for start in range(0, steps, 3):  # as many runs, each in another layout
        micro, dp = layouts[start // 3 % len(layouts)]
        ranks = [make(samples(), micro_batch_size=micro, dp_rank=r, dp_size=dp, **options) for r in range(dp)]
        for step in range(start, min(start + 3, steps)):
            parts = [rank.step(step) for rank in ranks]
            assert {len(part) for part in parts} == {4 // (micro * dp)}
            assert contents([mb for part in parts for mb in part]) == truth[step]
    if "shares" in options:
        return  # an epoch of a mixture is not an epoch of its sets
    line = [x for k in range(steps) for mb in make(samples(), **options | {"length_buckets": ()}).step(k)
            for x in contents([mb])]  # fmt: skip
    assert Counter(line[:46]) == {sample: 2 for sample in Counter(line[:23])} and len(Counter(line)) == 23


def test_buckets_pad_batches_and_balance_ranks():
    s, lengths = store(200), [4, 8, 16]
    ranks = [
        make(s, length_buckets=lengths, micro_batch_size=2, global_batch_size=16, dp_rank=r, dp_size=4)
        for r in range(4)
    ]
    plain = make(s, global_batch_size=16)
    for step in range(12):
        parts = [rank.step(step) for rank in ranks]
        assert contents([mb for part in parts for mb in part]) == contents(plain.step(step))
        rounds = list(zip(*parts, strict=True))
        for line in (mb for round_ in rounds for mb in round_):
            total = len(line.input_ids)
            assert total in lengths and total == min(bucket for bucket in lengths if bucket >= line.num_tokens)
            assert sum(line.lengths) == total and not line.loss_mask[line.num_tokens :].any()
        tokens = [[mb.num_tokens for mb in round_] for round_ in rounds]
        flat = [count for k, round_ in enumerate(tokens) for count in (round_[::-1] if k % 2 else round_)]
        assert flat == sorted(flat, reverse=True)
    # Position ids of padding are below seq_length.
    wide = make(s, length_buckets=[64], seq_length=9)
    assert max(int(mb.position_ids.max()) for mb in wide.step(0)) == 8
    empty = list(make(store(1), global_batch_size=2, dp_rank=1, dp_size=2, length_buckets=lengths).eval_batches())
    assert [[len(mb.input_ids) for mb in part] for part in empty] == [[4]]
    with pytest.raises(UsageError, match=r"a micro batch has \d tokens, data\.length_buckets ends at 4"):
        [make(s, length_buckets=[2, 4]).step(k) for k in range(50)]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("micro", "dp"), [(1, 1), (2, 2), (1, 4), (4, 1)])
def test_evaluation_takes_each_sample_once_with_equal_batches_per_rank(packing, micro, dp):
    s = store(21)
    ranks = [make(s, packing=packing, micro_batch_size=micro, dp_rank=r, dp_size=dp) for r in range(dp)]
    passes = [list(rank.eval_batches()) for rank in ranks]
    assert len({tuple(len(part) for part in passe) for passe in passes}) == 1
    everything = [mb for passe in passes for part in passe for mb in part]
    assert Counter(x for mb in everything for x in seen([mb])) == Counter(range(21))
    assert sum(mb.num_tokens for mb in everything) == int((s.lengths - 1).sum())
    assert all(len(mb.input_ids) >= 2 or mb.sample_ids for mb in everything)
    assert all(sum(mb.lengths) == len(mb.input_ids) for mb in everything)
    assert not any(mb.loss_mask.any() for mb in everything if not mb.sample_ids)


def test_empty_micro_batch_is_padded_like_the_others():
    parts = list(make(store(1), global_batch_size=2, dp_rank=1, dp_size=2, pad_to_multiple_of=3).eval_batches())
    assert [[len(mb.input_ids) for mb in part] for part in parts] == [[3]]
    assert parts[0][0].lengths == (3,)


def test_sequences_have_at_most_seq_length_tokens():
    b = make(store(200), packing=True, seq_length=10)
    assert all(mb.num_tokens <= 10 for k in range(20) for mb in b.step(k))
    assert b.sequences_per_epoch < 200


def test_bad_sizes_are_refused_with_a_hint():
    with pytest.raises(
        UsageError, match=r"global_batch_size=10 .*micro_batch_size=2 x data-parallel ranks=2\. Use 8 or 12"
    ):
        make(store(), global_batch_size=10, micro_batch_size=2, dp_size=2)
    with pytest.raises(UsageError, match=r"Use 4\."):
        make(store(), global_batch_size=3, micro_batch_size=2, dp_size=2)
    with pytest.raises(UsageError, match="micro_batch_size=0"):
        make(store(), micro_batch_size=0)
    for packing in (False, True):
        with pytest.raises(DataError, match="the sequence length is 4"):
            make(store(), seq_length=4, packing=packing)
    with pytest.raises(DataError, match="no samples"):
        make(SampleStore.from_samples([]))
    with pytest.raises(DataError, match="sample 0 has fewer than 2 tokens"):
        make(SampleStore.from_samples([([1], [1])]))


def test_memory_mapped_store_gives_the_same_batches(tmp_path):
    with IndexedWriter(tmp_path / "s", np.int32, masked=True) as writer:
        for k in range(len(store())):
            writer.extend(store()[k][0], (len(store()[k][0]),), store()[k][1])
    write_manifest(tmp_path / "s", {"pair": writer.close()})
    mapped = SampleStore.from_indexed(open_indexed(tmp_path / "s"))
    for a, b in zip(make(store()).step(2), make(mapped).step(2), strict=True):
        assert np.array_equal(a.labels.numpy(), b.labels.numpy())


@pytest.mark.parametrize("packing", [False, True])
def test_equal_lengths_pad_the_micro_batches_of_a_step(packing):
    s = store()
    plain, padded = (
        make(s, packing=packing, dp_size=2, pad_to_multiple_of=4, equal_lengths=equal) for equal in (False, True)
    )
    steps = ([batches.step(1), *batches.eval_batches()] for batches in (plain, padded))
    for unequal, equal in zip(*steps, strict=True):
        longest = max(len(mb.input_ids) for mb in unequal)
        for a, b in zip(unequal, equal, strict=True):
            assert len(b.input_ids) == longest and longest % 4 == 0
            assert (a.sample_ids, a.sample_lengths) == (b.sample_ids, b.sample_lengths)
            for name in ("input_ids", "labels", "loss_mask", "position_ids"):
                assert torch.equal(getattr(a, name)[: a.num_tokens], getattr(b, name)[: a.num_tokens])
            assert not b.loss_mask[a.num_tokens :].any()


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("micro", "dp"), [(1, 1), (2, 2), (1, 4)])
def test_mixtures_are_exact_and_the_same_in_every_layout(packing, micro, dp):
    parts = [(store(6, seed=1), 3.0), (store(17, seed=2), 1.0)]
    both = SampleStore.concatenated(
        [
            SampleStore.from_samples(
                [([int(t[0]) + 100 * k, *t[1:].tolist()], m) for t, m in (s[i] for i in range(len(s)))]
            )
            for k, (s, _) in enumerate(parts)
        ]
    )
    shares = [MixtureSet(f"set {k}", len(s), weight) for k, (s, weight) in enumerate(parts)]
    settings = {"shares": shares, "packing": packing, "seed": 3}
    full = make(both, **settings)
    alone = [make(s, packing=packing).sequences_per_epoch for s, _ in parts]
    assert full.sequences_per_epoch == sum(alone)
    lines = [make(both, **settings, global_batch_size=1).step(k) for k in range(40)]
    sets = [{number // 100 for number in seen(line)} for line in lines]
    assert all(len(mixed) == 1 for mixed in sets), "samples of two sets lie in one sequence"
    assert sets.count({0}) == 30
    assert full.epochs(10) == {"set 0": 30 / alone[0], "set 1": 10 / alone[1]}
    ranks = [make(both, **settings, micro_batch_size=micro, dp_rank=r, dp_size=dp) for r in range(dp)]
    for step in (7, 0, 4):
        rounds = zip(*(rank.step(step) for rank in ranks), strict=True)
        dealt = [number for round_ in rounds for mb in round_ for number in seen([mb])]
        assert dealt == seen(full.step(step)) == [x for line in lines[step * 4 : step * 4 + 4] for x in seen(line)]
    with pytest.raises(DataError, match="a set has none"):
        make(both, shares=[*shares, MixtureSet("empty", 0, 1.0)])


ORDER = [[8, 16, 4, 1], [12, 17, 15, 16]]


@pytest.mark.parametrize("reset_attention_mask", [False, True])
@pytest.mark.parametrize("reset_position_ids", [False, True])
@pytest.mark.parametrize("eod_mask_loss", [False, True])
def test_document_ends_do_what_they_do_in_megatron_core(
    reset_attention_mask: bool, reset_position_ids: bool, eod_mask_loss: bool
) -> None:
    from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

    flags = {
        "reset_attention_mask": reset_attention_mask,
        "reset_position_ids": reset_position_ids,
        "eod_mask_loss": eod_mask_loss,
    }
    samples = [[5, 6, 0, 7, 8, 9, 0, 0, 4, 3], [0, 1, 2, 3, 0, 1], [4, 4, 4], [1, 0, 2]]
    s = SampleStore.from_samples([(tokens, [1] * len(tokens)) for tokens in samples])
    options = {"packing": True, "shuffle": False, "global_batch_size": 1, "pad_to_multiple_of": 4, "seq_length": 30}
    (mb,) = make(s, documents=DocumentEnds(eod=0, **flags), **options).step(0)
    assert sum(mb.lengths) == mb.input_ids.numel() and mb.padding
    assert len(mb.loss_tokens) == len(mb.lengths) == len(mb.sample_ids) + 1
    assert mb.loss_tokens == tuple(int(part.sum()) for part in mb.loss_mask.split(mb.lengths))
    document = torch.arange(len(mb.lengths)).repeat_interleave(torch.tensor(mb.lengths))
    start = 0
    for number in dict.fromkeys(mb.sample_ids):
        tokens = torch.tensor(samples[number])
        span = slice(start, start + len(tokens) - 1)
        masked, loss, positions = _get_ltor_masks_and_position_ids(tokens[:-1], 0, create_attention_mask=True, **flags)
        assert torch.equal(mb.input_ids[span], tokens[:-1]) and torch.equal(mb.position_ids[span], positions)
        assert torch.equal(mb.loss_mask[span], loss.bool()) and torch.equal(mb.labels[span], tokens[1:] * loss.bool())
        causal = torch.ones(len(positions), len(positions)).tril().bool()
        seen = causal & (document[span, None] == document[None, span])
        assert torch.equal(~masked[0], seen)
        start = span.stop
    assert start == mb.num_tokens


def test_order_of_a_checkpoint_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of a large set continues in the order of the version that wrote its checkpoint."""
    in_memory = [seen(make(store()).step(k)) for k in range(6)]
    monkeypatch.setattr(mixture, "COMPUTED_FROM", 20)
    batches = make(store())
    computed = [seen(batches.step(k)) for k in range(6)]
    assert computed != in_memory and len({sample for step in computed[:5] for sample in step}) == 20
    assert (batches.order_version, make(store(19)).order_version) == ("-order2", "")
    batches.use_order_of("hash-order2")
    assert [seen(batches.step(k)) for k in range(6)] == computed
    batches.use_order_of("hash")
    assert [seen(batches.step(k)) for k in range(6)] == in_memory
    assert batches.order_version == ""
