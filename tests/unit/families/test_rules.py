"""Every family, every rule: weaving and cutting lose nothing and mean what Megatron-Core means."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.registry import all_families
from isthmus.families.rule import Rule, qkv
from isthmus.families.shard import Layout, check_tp_size, local_shape, pieces

ARCH = Architecture(
    family="llama",
    num_layers=2,
    hidden_size=24,
    ffn_hidden_size=40,
    num_attention_heads=8,
    num_query_groups=2,
    kv_channels=4,
    vocab_size=77,
    max_position_embeddings=64,
    norm_epsilon=1e-6,
    rotary_base=10000.0,
)


def rules() -> Iterator[tuple[str, Architecture, Rule]]:
    for family in all_families().values():
        for tied in (False, True):
            for groups in (1, 2, 4, 8):
                arch = dataclasses.replace(
                    ARCH, family=family.name, tie_embeddings=tied, num_query_groups=groups, **family.traits
                )
                for rule in family.rules:
                    if rule.holds(arch):
                        yield f"{family.name}-{rule.canonical}-tied{tied:d}-g{groups}", arch, rule


CASES = list(rules())


def numbered(shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Tensors in which no number occurs twice, so that a misplaced element shows."""
    total, parts = 1, []
    for shape in shapes:
        size = int(torch.Size(shape).numel())
        parts.append(torch.arange(total, total + size, dtype=torch.float64).reshape(shape))
        total += size
    return parts


@pytest.mark.parametrize(("arch", "rule"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_weave_is_undone_by_unweave(arch: Architecture, rule: Rule) -> None:
    parts = numbered(rule.part_shapes(arch))
    canonical = rule.weave(parts, arch)
    assert tuple(canonical.shape) == rule.canonical_shape(arch)
    assert all(torch.equal(a, b) for a, b in zip(rule.unweave(canonical, arch), parts, strict=True))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("arch", "rule"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_ranks_together_hold_every_element(arch: Architecture, rule: Rule, tp: int) -> None:
    parts = numbered(rule.part_shapes(arch))
    whole = rule.weave(parts, arch)
    padded = 80
    back = [torch.zeros_like(part) for part in parts]
    written = [torch.zeros_like(part) for part in parts]
    ranks = []
    for rank in range(tp):
        layout = Layout(tp_rank=rank, tp_size=tp, padded_vocab_size=padded)
        local = torch.zeros(local_shape(rule, arch, layout), dtype=torch.float64)
        for piece in pieces(rule, arch, layout):
            local[piece.local] = parts[piece.part][piece.hf]
            back[piece.part][piece.hf] = local[piece.local]
            written[piece.part][piece.hf] += 1
        ranks.append(local)
    # What Megatron-Core expects of a rank, written down apart from the table.
    match rule.shard:
        case "whole":
            wanted = [whole] * tp
        case "cols":
            wanted = list(whole.chunk(tp, dim=1))
        case "gate_up":
            halves = whole.chunk(2)
            wanted = [torch.cat([half.chunk(tp)[rank] for half in halves]) for rank in range(tp)]
        case "vocab":
            rows = torch.cat([whole, torch.zeros(padded - len(whole), whole.shape[1], dtype=whole.dtype)])
            wanted = list(rows.chunk(tp))
        case _:
            wanted = list(whole.chunk(tp))
    assert all(torch.equal(got, want) for got, want in zip(ranks, wanted, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(back, parts, strict=True))
    once = tp if rule.shard == "whole" else 1
    assert all((count == once).all() for count in written)


def test_qkv_lies_group_by_group() -> None:
    rule = qkv("qkv", "q", "k", "v")
    arch = dataclasses.replace(ARCH, num_attention_heads=4, num_query_groups=2, kv_channels=1)
    q, k, v = torch.tensor([1, 2, 3, 4]), torch.tensor([10, 20]), torch.tensor([100, 200])
    assert rule.weave([q, k, v], arch).tolist() == [1, 2, 10, 100, 3, 4, 20, 200]


def test_padding_may_fill_whole_ranks() -> None:
    rule = next(rule for rule in all_families()["llama"].rules if rule.shard == "vocab")
    arch = dataclasses.replace(ARCH, vocab_size=5)
    rows = [
        [piece.hf[0] for piece in pieces(rule, arch, Layout(tp_rank=rank, tp_size=4, padded_vocab_size=16))]
        for rank in range(4)
    ]
    assert rows == [[slice(0, 4)], [slice(4, 5)], [], []]


@pytest.mark.parametrize(
    ("tp", "message"),
    [
        (3, "tp=3 does not divide num_attention_heads=8 (qwen3). Use 1, 2, 4 or 8."),
        (0, "tp=0 does not divide num_attention_heads=8 (qwen3). Use 1, 2, 4 or 8."),
    ],
)
def test_a_tp_size_that_does_not_fit_is_refused(tp: int, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_tp_size(dataclasses.replace(ARCH, family="qwen3"), tp)
    assert str(caught.value) == message


def test_query_groups_decide_too() -> None:
    arch = dataclasses.replace(ARCH, num_attention_heads=12, num_query_groups=6, ffn_hidden_size=48)
    with pytest.raises(UsageError, match=r"tp=4 does not divide num_query_groups=6 \(llama\). Use 1, 2, 3, 6 or 12."):
        check_tp_size(arch, 4)
    check_tp_size(arch, 12)


def test_layers_are_counted_over_the_whole_model() -> None:
    placements = all_families()["qwen2"].placements(dataclasses.replace(ARCH, qkv_bias=True))
    names = list(placements)
    assert names[0] == "embedding.word_embeddings.weight"
    assert names[-1] == "output_layer.weight"
    assert placements["decoder.layers.1.self_attention.linear_qkv.bias"].hf == (
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.1.self_attn.k_proj.bias",
        "model.layers.1.self_attn.v_proj.bias",
    )
    assert len(names) == 2 * 7 + 3
