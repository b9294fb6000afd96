"""Locations of tensors in a torch_dist checkpoint, for each kind of model."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.engine.tensor_names import CheckpointSlot, Spelling, live_names, spelling_of, transformer_engine_name
from isthmus.families.architecture import from_settings
from isthmus.families.blocks.attention import WindowAttention
from isthmus.families.blocks.indexer import KeyIndexer
from isthmus.families.blocks.latent_attention import Latent
from isthmus.families.blocks.mamba2 import Mamba2

DENSE = Spelling(num_layers=4)
ALL_EXPERTS = Spelling(num_layers=4, num_experts=8, moe_layers=frozenset(range(4)))
SOME_EXPERTS = Spelling(num_layers=4, num_experts=8, moe_layers=frozenset({1, 2, 3}))
LATENT = Spelling(num_layers=4, num_experts=8, moe_layers=frozenset({1, 2, 3, 4}), latent=True)
"""Like DeepSeek-V3 with one MTP layer."""
DELTA = Spelling(num_layers=3, mixers=(("gated_delta_net",), ("gated_delta_net",), ("attention",)))
"""Like Qwen3-Next, without experts."""
SINGLE = Spelling(num_layers=3, mixers=(("mamba2",), (), ("attention",)), single_blocks=True)
"""Like Nemotron-H."""
BOTH = Spelling(num_layers=3, mixers=(("attention", "mamba2"),) * 3)
"""Like Falcon-H1."""
MAMBA = Mamba2(num_heads=2, head_dim=4, state_size=4, num_groups=1, kernel=2)
MLA = Latent(kv_lora_rank=4, qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=4, q_lora_rank=4)
L2, M2 = "decoder.layers.2.", "decoder.layers.2.mlp."
EXPERT = f"{M2}experts.local_experts.5.linear_fc1.weight"
FUSED_INPUT = "self_attention.linear_qkv.layer_norm_weight"
FUSED_MLP = "mlp.linear_fc1.layer_norm_weight"


@pytest.mark.parametrize("spelling", [DENSE, ALL_EXPERTS, SOME_EXPERTS, LATENT])
@pytest.mark.parametrize("name", ["embedding.word_embeddings.weight", "output_layer.weight"])
def test_tensors_outside_layers(spelling: Spelling, name: str) -> None:
    assert spelling.slots(name) == [CheckpointSlot(name)]


@pytest.mark.parametrize(
    ("spelling", "canonical", "places"),
    [
        (DENSE, f"{M2}linear_fc1.weight", [CheckpointSlot("decoder.layers.mlp.linear_fc1.weight", (2,), (4,))]),
        (DENSE, f"{L2}input_layernorm.weight", [CheckpointSlot(f"decoder.layers.{FUSED_INPUT}", (2,), (4,))]),
        (DENSE, f"{L2}pre_mlp_layernorm.weight", [CheckpointSlot(f"decoder.layers.{FUSED_MLP}", (2,), (4,))]),
        (DENSE, "decoder.final_layernorm.weight", [CheckpointSlot("decoder.final_layernorm.weight")]),
        (
            ALL_EXPERTS,
            f"{L2}pre_mlp_layernorm.weight",  # TransformerEngine's layers and the plain ones do not agree
            [
                CheckpointSlot("decoder.layers.pre_mlp_layernorm.weight", (2,), (4,)),
                CheckpointSlot(f"decoder.layers.{FUSED_MLP}", (2,), (4,)),
            ],
        ),
        (ALL_EXPERTS, EXPERT, [CheckpointSlot("decoder.layers.mlp.experts.experts.linear_fc1.weight", (2, 5), (4, 8))]),
        (ALL_EXPERTS, f"{M2}router.weight", [CheckpointSlot("decoder.layers.mlp.router.weight", (2,), (4,))]),
        (SOME_EXPERTS, EXPERT, [CheckpointSlot(f"{M2}experts.experts.linear_fc1.weight", (5,), (8,))]),
        (SOME_EXPERTS, f"{L2}input_layernorm.weight", [CheckpointSlot(f"{L2}{FUSED_INPUT}")]),
        (
            SOME_EXPERTS,
            "decoder.layers.0.pre_mlp_layernorm.weight",
            [CheckpointSlot(f"decoder.layers.0.{FUSED_MLP}")],
        ),
        (
            SOME_EXPERTS,
            f"{L2}pre_mlp_layernorm.weight",
            [CheckpointSlot(f"{L2}pre_mlp_layernorm.weight"), CheckpointSlot(f"{L2}{FUSED_MLP}")],
        ),
        (LATENT, f"{L2}input_layernorm.weight", [CheckpointSlot(f"{L2}input_layernorm.weight")]),
        (LATENT, f"{L2}pre_mlp_layernorm.weight", [CheckpointSlot(f"{L2}pre_mlp_layernorm.weight")]),
        (
            LATENT,
            f"{L2}self_attention.kv_layernorm.weight",
            [
                CheckpointSlot(f"{L2}self_attention.linear_kv_up_proj.layer_norm_weight"),
                CheckpointSlot(f"{L2}self_attention.kv_layernorm.weight"),
            ],
        ),
        (
            LATENT,
            "decoder.layers.0.pre_mlp_layernorm.weight",
            [
                CheckpointSlot(f"decoder.layers.0.{FUSED_MLP}"),
                CheckpointSlot("decoder.layers.0.pre_mlp_layernorm.weight"),
            ],
        ),
        (
            LATENT,
            "mtp.layers.0.transformer_layer.mlp.experts.local_experts.7.linear_fc2.weight",
            [CheckpointSlot("mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc2.weight", (7,), (8,))],
        ),
        (
            DELTA,
            "decoder.layers.1.input_layernorm.weight",
            [CheckpointSlot("decoder.layers.1.self_attention.in_proj.layer_norm_weight")],
        ),
        (DELTA, f"{L2}input_layernorm.weight", [CheckpointSlot(f"{L2}{FUSED_INPUT}")]),
        (DELTA, "decoder.final_layernorm.weight", [CheckpointSlot("decoder.final_layernorm.weight")]),
        (
            SINGLE,
            "decoder.layers.0.input_layernorm.weight",
            [CheckpointSlot("decoder.layers.0.mixer.in_proj.layer_norm_weight")],
        ),
        (
            SINGLE,
            "decoder.layers.1.pre_mlp_layernorm.weight",
            [CheckpointSlot(f"decoder.layers.1.{FUSED_MLP}")],
        ),
        (SINGLE, "decoder.final_layernorm.weight", [CheckpointSlot("decoder.final_norm.weight")]),
        (BOTH, f"{L2}input_layernorm.weight", [CheckpointSlot(f"{L2}input_layernorm.weight")]),
        (BOTH, f"{L2}mixer.out_proj.weight", [CheckpointSlot(f"{L2}mixer.out_proj.weight")]),
        (
            LATENT,
            "mtp.layers.0.transformer_layer.pre_mlp_layernorm.weight",
            [CheckpointSlot("mtp.layers.0.transformer_layer.pre_mlp_layernorm.weight")],
        ),
    ],
)
def test_slots(spelling: Spelling, canonical: str, places: list[CheckpointSlot]) -> None:
    assert spelling.slots(canonical) == places
    possible = spelling.candidate_slots(canonical)
    assert possible[: len(places)] == places


def test_candidates_include_every_name() -> None:
    results = [place.key for place in DENSE.candidate_slots(f"{L2}input_layernorm.weight")]
    assert results == [
        f"decoder.layers.{FUSED_INPUT}",
        "decoder.layers.input_layernorm.weight",
        f"{L2}{FUSED_INPUT}",
        f"{L2}input_layernorm.weight",
    ]
    assert [place.key for place in SOME_EXPERTS.candidate_slots(EXPERT)] == [
        f"{M2}experts.experts.linear_fc1.weight",
        "decoder.layers.mlp.experts.experts.linear_fc1.weight",
    ]


def test_linear_layers_have_extra_states() -> None:
    names = [
        "embedding.word_embeddings.weight",
        f"{L2}input_layernorm.weight",
        f"{L2}self_attention.linear_qkv.weight",
        f"{L2}self_attention.linear_qkv.bias",
        f"{M2}router.weight",
        f"{M2}shared_experts.linear_fc1.weight",
        EXPERT,
        "output_layer.weight",
    ]
    assert ALL_EXPERTS.extra_states(names) == [
        "decoder.layers.self_attention.linear_qkv._extra_state/shard_2_4",
        "decoder.layers.mlp.shared_experts.linear_fc1._extra_state/shard_2_4",
        "decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_2.5_4.8",
    ]
    assert SOME_EXPERTS.extra_states(names) == [
        f"{L2}self_attention.linear_qkv._extra_state/shard_0_1",
        f"{M2}shared_experts.linear_fc1._extra_state/shard_0_1",
        f"{M2}experts.experts.linear_fc1._extra_state/shard_5_8",
    ]


@pytest.mark.parametrize(
    ("spelling", "canonical", "live"),
    [
        (DENSE, f"{L2}pre_mlp_layernorm.bias", f"{L2}mlp.linear_fc1.layer_norm_bias"),
        (ALL_EXPERTS, f"{L2}pre_mlp_layernorm.weight", f"{L2}pre_mlp_layernorm.weight"),
        (ALL_EXPERTS, EXPERT, f"{M2}experts.linear_fc1.weight5"),
        (LATENT, f"{L2}self_attention.q_layernorm.weight", f"{L2}self_attention.linear_q_up_proj.layer_norm_weight"),
        (LATENT, f"{L2}self_attention.linear_q_proj.weight", f"{L2}self_attention.linear_q_proj.weight"),
    ],
)
def test_live_names(spelling: Spelling, canonical: str, live: str) -> None:
    assert transformer_engine_name(canonical, spelling) == live
    assert {canonical, live} <= set(live_names(canonical))


def test_sections_of_mamba2_are_tensors_of_their_own() -> None:
    result = BOTH.slots(f"{L2}mixer.conv1d.bias", [8, 4, 4])
    key = f"{L2}mixer.conv1d.bias"
    assert result == [
        CheckpointSlot(f"{key}.x", rows=(0, 8)),
        CheckpointSlot(f"{key}.B", rows=(8, 12)),
        CheckpointSlot(f"{key}.C", rows=(12, 16)),
    ]
    assert BOTH.alternatives(key, [8, 4, 4]) == [result]
    assert DELTA.slots("decoder.layers.0.self_attention.in_proj.weight") == [
        CheckpointSlot("decoder.layers.0.self_attention.in_proj.weight")
    ]


def test_extra_states_of_hybrid_layers() -> None:
    names = [f"{L2}mixer.in_proj.weight", f"{L2}mixer.out_proj.weight", f"{L2}mixer.norm.weight"]
    assert SINGLE.extra_states(names) == [
        f"{L2}mixer.{name}._extra_state/shard_0_1" for name in ("in_proj", "out_proj")
    ]


@pytest.mark.parametrize(
    ("changes", "homogeneous", "single_blocks"),
    [
        ({}, True, False),
        ({"mixers": (("mamba2",), ("attention",)) * 2, "mamba2": MAMBA}, False, False),
        ({"mixers": (("mamba2",), ()) * 2, "layers_without_mlp": (0, 2), "mamba2": MAMBA}, False, True),
        ({"layers_without_mlp": (0,)}, False, False),
        ({"sliding_window": 4, "window_attention": WindowAttention(kv_channels=8)}, False, False),
        ({"mla": MLA, "indexer": KeyIndexer(top_k=4, num_heads=2, head_dim=4)}, True, False),
        ({"mla": MLA, "indexer": KeyIndexer(top_k=4, num_heads=2, head_dim=4, shared_layers=(3,))}, False, False),
    ],
)
def test_layers_that_differ_are_not_stacked(changes: dict[str, Any], homogeneous: bool, single_blocks: bool) -> None:
    sizes = {"hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 2, "num_query_groups": 2, "kv_channels": 4}
    ends = {"vocab_size": 16, "max_position_embeddings": 8, "norm_epsilon": 1e-6}
    result = spelling_of(from_settings({"family": "", "num_layers": 4, **sizes, **ends, **changes}))
    assert (result.homogeneous, result.single_blocks) == (homogeneous, single_blocks)
