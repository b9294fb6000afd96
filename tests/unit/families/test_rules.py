"""Rules of all families: no element is lost, and shards are those of Megatron-Core."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture, from_settings
from isthmus.families.blocks.delta_net import DeltaNet
from isthmus.families.blocks.feed_forward import Experts
from isthmus.families.blocks.indexer import KeyIndexer
from isthmus.families.blocks.latent_attention import Latent
from isthmus.families.blocks.mamba import Mamba
from isthmus.families.blocks.mamba2 import Mamba2
from isthmus.families.blocks.short_convolution import ShortConvolution
from isthmus.families.family import Family
from isthmus.families.registry import all_families
from isthmus.families.rules.rule import Rule, gate_up, gated_qkv, qkv
from isthmus.families.rules.shard import Layout, assemble, check_tp_size, local_shape, owned_slices, tensor_slices

ARCH = from_settings(
    {
        "family": "llama",
        "num_layers": 2,
        "hidden_size": 24,
        "ffn_hidden_size": 40,
        "num_attention_heads": 8,
        "num_query_groups": 2,
        "kv_channels": 4,
        "vocab_size": 77,
        "max_position_embeddings": 64,
        "norm_epsilon": 1e-6,
        "rotary_base": 10000.0,
    }
)


MOE = Experts(num_experts=3, top_k=2, ffn_hidden_size=12, shared_ffn_hidden_size=8, shared_gate=True)
DELTA_NET = DeltaNet(num_key_heads=8, num_value_heads=16, key_head_dim=2, value_head_dim=3, conv_kernel=4)
MLA = Latent(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=6, q_lora_rank=12)

INNER = {
    **{"moe": MOE, "mla": MLA, "delta_net": DELTA_NET, "indexer": KeyIndexer(top_k=4, num_heads=3, head_dim=6)},
    "mamba2": Mamba2(num_heads=8, head_dim=3, state_size=5, num_groups=4, kernel=4),
    "mamba": Mamba(inner_size=16, state_size=5, time_step_rank=3, kernel=4),
    "short_convolution": ShortConvolution(kernel=3),
}


def sized(family: Family, **sizes: Any) -> Architecture:
    """An architecture of this family, with everything in it that the family may have."""
    plain = {name: value for name, value in family.traits.items() if "." not in name}
    names = {*family.keys, *family.traits, *family.derived}
    inner = {name: module for name, module in INNER.items() if any(path.startswith(name) for path in names)}
    return ARCH.with_settings({"family": family.name, **{**plain, **inner, **sizes}})


def rules() -> Iterator[tuple[str, Architecture, Rule]]:
    """Every rule once: those that differ in nothing but names are one."""
    seen: set[object] = set()
    for family in all_families().values():
        switches = {name: True for name, key in family.keys.items() if key.kind is bool and "." not in name}
        for tied in (False, True):
            for groups in (1, 2, 4, 8):
                arch = sized(family, **switches | {"tie_embeddings": tied, "num_query_groups": groups})
                for rule in (rule.for_heads(arch) for rule in family.rules):
                    names = [part.name for part in rule.parts]
                    sections = tuple(names.index(name) for name in names)
                    symbols = tuple(part.symbols for part in rule.parts)
                    how = (
                        rule.shard,
                        rule.strands,
                        rule.hf_strands,
                        rule.hf_order,
                        rule.interleaved,
                        rule.transposed,
                        rule.stacked,
                        rule.is_expert,
                    )
                    kind = (symbols, sections, how, groups if rule.shard == "heads" else 0)
                    if rule.applies(arch) and kind not in seen:
                        seen.add(kind)
                        yield f"{family.name}-{rule.canonical}-g{groups}", arch, rule


CASES = list(rules())


def numbered(shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Tensors in which no number occurs twice, so that a misplaced element shows."""
    total, parts = 1, []
    for shape in shapes:
        size = int(torch.Size(shape).numel())
        parts.append(torch.arange(total, total + size, dtype=torch.float64).reshape(shape))
        total += size
    return parts


def hf_tensors(rule: Rule, arch: Architecture) -> dict[str, torch.Tensor]:
    shapes = rule.hf_shapes(arch)
    return dict(zip(shapes, numbered(list(shapes.values())), strict=True))


def assembled(rule: Rule, arch: Architecture, tensors: dict[str, torch.Tensor], expert: int = 0) -> torch.Tensor:
    return assemble(rule, arch, lambda part, index: tensors[rule.parts[part].name][index], expert)


@pytest.mark.parametrize(("arch", "rule"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_rule_uses_every_element_once(arch: Architecture, rule: Rule) -> None:
    tensors = hf_tensors(rule, arch)
    experts = range(arch.moe.num_experts if rule.stacked and rule.is_expert and arch.moe is not None else 1)
    whole_tensors = [assembled(rule, arch, tensors, expert) for expert in experts]
    assert all(tuple(tensor.shape) == rule.canonical_shape(arch) for tensor in whole_tensors)
    everything = torch.cat([tensor.flatten() for tensor in whole_tensors]).sort().values
    assert torch.equal(everything, torch.cat([tensor.flatten() for tensor in tensors.values()]).sort().values)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(("arch", "rule"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_ranks_together_have_every_element(arch: Architecture, rule: Rule, tp: int) -> None:
    tensors = hf_tensors(rule, arch)
    parts = [tensors[part.name] for part in rule.parts]
    expert = 1 if rule.stacked and rule.is_expert else 0
    full = assembled(rule, arch, tensors, expert)
    padded = 80
    back = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    written = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    ranks = []
    for rank in range(tp):
        layout = Layout(tp_rank=rank, tp_size=tp, etp_rank=rank, etp_size=tp, padded_vocab_size=padded)
        local = torch.zeros(local_shape(rule, arch, layout), dtype=torch.float64)
        for piece in tensor_slices(rule, arch, layout, expert):
            name = rule.parts[piece.part].name
            piece.view(local).copy_(parts[piece.part][piece.hf])
            back[name][piece.hf] = piece.view(local)
            written[name][piece.hf] += 1
        shares = torch.zeros_like(local)
        for mine, here in owned_slices(rule, arch, layout):
            shares[here] = full[mine]
        assert torch.equal(shares, local)
        ranks.append(local)
    # What Megatron-Core expects of a rank, written down apart from the table.
    match rule.shard:
        case "whole":
            expected = [full] * tp
        case "cols":
            expected = list(full.chunk(tp, dim=1))
        case "third":
            expected = list(full.chunk(tp, dim=2))
        case "gate_up":
            halves = full.chunk(2)
            expected = [torch.cat([half.chunk(tp)[rank] for half in halves]) for rank in range(tp)]
        case "parts":
            sections = full.split([shape[0] for shape in rule.part_shapes(arch)])
            expected = [torch.cat([section.chunk(tp)[rank] for section in sections]) for rank in range(tp)]
        case "vocab":
            rows = torch.cat([full, full.new_zeros(padded - len(full), *full.shape[1:])])
            expected = list(rows.chunk(tp))
        case _:
            expected = list(full.chunk(tp))
    assert all(torch.equal(got, want) for got, want in zip(ranks, expected, strict=True))
    once = tp if rule.shard == "whole" else 1
    for name, tensor in tensors.items():
        # A stacked tensor has other experts beside the one that was placed.
        here = slice(expert, expert + 1) if rule.stacked and rule.per_head is None else slice(None)
        assert torch.equal(back[name][here], tensor[here])
        assert (written[name][here] == once).all()


def test_qkv_is_grouped_by_query_group() -> None:
    rule = qkv("qkv", "q", "k", "v")
    arch = ARCH.with_settings({"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 1})
    tensors = {"q": torch.tensor([1, 2, 3, 4]), "k": torch.tensor([10, 20]), "v": torch.tensor([100, 200])}
    assert assembled(rule, arch, tensors).tolist() == [1, 2, 10, 100, 3, 4, 20, 200]


def test_sections_of_a_tensor_are_like_separate_tensors() -> None:
    rule = qkv("qkv", "qkv", "qkv", "qkv")
    arch = ARCH.with_settings({"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 1})
    assert rule.hf_shapes(arch) == {"qkv": (8,)}
    item = {"qkv": torch.tensor([1, 2, 3, 4, 10, 20, 100, 200])}
    assert assembled(rule, arch, item).tolist() == [1, 2, 10, 100, 3, 4, 20, 200]


def test_sections_repeat_in_a_tensor() -> None:
    rule = gated_qkv("qkv", "q", "k", "v")
    arch = ARCH.with_settings(
        {"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 1, "attention_gate": True}
    )
    assert rule.hf_shapes(arch) == {"q": (8,), "k": (2,), "v": (2,)}
    # Query and gate of each head; in Megatron-Core, queries and gates of each group.
    q = torch.tensor([1, -1, 2, -2, 3, -3, 4, -4])
    tensors = {"q": q, "k": torch.tensor([10, 20]), "v": torch.tensor([100, 200])}
    assert assembled(rule, arch, tensors).tolist() == [1, 2, -1, -2, 10, 100, 3, 4, -3, -4, 20, 200]


def test_sections_may_have_another_order() -> None:
    rule = qkv("qkv", "qkv", "qkv", "qkv", hf_order=(0, 2, 1), hf_strands="2")
    arch = ARCH.with_settings({"num_attention_heads": 4, "num_query_groups": 4, "kv_channels": 1})
    item = {"qkv": torch.tensor([1, 2, 100, 200, 10, 20, 3, 4, 300, 400, 30, 40])}
    assert assembled(rule, arch, item).tolist() == [1, 10, 100, 2, 20, 200, 3, 30, 300, 4, 40, 400]


def test_interleaved_transposed_stacked_experts() -> None:
    rule = gate_up("experts.{expert}.fc1", "e", "e", "H", width="X", interleaved=True, transposed=True, stacked=True)
    arch = ARCH.with_settings({"hidden_size": 2, "moe": Experts(num_experts=2, top_k=1, ffn_hidden_size=2)})
    assert rule.hf_shapes(arch) == {"e": (2, 2, 4)}
    full = torch.arange(16).reshape(2, 2, 4)
    # Rows: the gates 0 and 2, then the ups 1 and 3, of the second expert.
    assert assembled(rule, arch, {"e": full}, 1).tolist() == [[8, 12], [10, 14], [9, 13], [11, 15]]


def test_padding_may_fill_whole_ranks() -> None:
    rule = next(rule for rule in all_families()["llama"].rules if rule.shard == "vocab")
    arch = dataclasses.replace(ARCH, vocab_size=5)
    rows = [
        [piece.hf[0] for piece in tensor_slices(rule, arch, Layout(tp_rank=rank, tp_size=4, padded_vocab_size=16))]
        for rank in range(4)
    ]
    assert rows == [[slice(0, 4, 1)], [slice(4, 5, 1)], [], []]


@pytest.mark.parametrize(
    ("tp", "message"),
    [
        (3, "tp=3 does not divide num_attention_heads=8 (qwen3). Use 1, 2, 4 or 8."),
        (0, "tp=0 does not divide num_attention_heads=8 (qwen3). Use 1, 2, 4 or 8."),
    ],
)
def test_invalid_tp_size_is_rejected(tp: int, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_tp_size(dataclasses.replace(ARCH, family="qwen3"), tp)
    assert str(caught.value) == message


def test_tp_size_must_fit_query_groups() -> None:
    arch = ARCH.with_settings({"num_attention_heads": 12, "num_query_groups": 6, "ffn_hidden_size": 48})
    with pytest.raises(UsageError, match=r"tp=4 does not divide num_query_groups=6 \(llama\). Use 1, 2, 3, 6 or 12."):
        check_tp_size(arch, 4)
    check_tp_size(arch, 12)


def test_tp_size_must_fit_groups_of_mamba_heads() -> None:
    """A group may be shared by ranks, and a rank may have several groups."""
    sizes = Mamba2(num_heads=24, head_dim=4, state_size=8, num_groups=4, kernel=4)
    fields = {"family": "bamba", "num_attention_heads": 24, "num_query_groups": 24, "ffn_hidden_size": 48}
    arch = ARCH.with_settings({**fields, "mixers": (("mamba2",), ("attention",)), "mamba2": sizes})
    for tp in (1, 2, 4, 8):
        check_tp_size(arch, tp)
    message = (
        "tp=6 neither divides the 4 groups of Mamba heads nor is a multiple of them (bamba). Use 1, 2, 4, 8, 12 or 24."
    )
    with pytest.raises(UsageError, match=re.escape(message)):
        check_tp_size(arch.with_settings({"mamba2": dataclasses.replace(sizes, state_size=12)}), 6)
    with pytest.raises(UsageError, match="tp=3 does not divide channels of B of Mamba=32"):
        check_tp_size(arch, 3)


def test_layers_are_counted_over_the_whole_model() -> None:
    placements = all_families()["qwen2"].placements(ARCH.with_settings({"qkv_bias": True}))
    names = list(placements)
    assert names[0] == "embedding.word_embeddings.weight"
    assert names[-1] == "output_layer.weight"
    assert placements["decoder.layers.1.self_attention.linear_qkv.bias"].hf == (
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.1.self_attn.k_proj.bias",
        "model.layers.1.self_attn.v_proj.bias",
    )
    assert len(names) == 2 * 7 + 3
