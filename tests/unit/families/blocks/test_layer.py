"""Weights and activations of layers; tests/ranks compares the activations with autograd."""

from __future__ import annotations

import math
from typing import Any

import pytest

from isthmus.engine.tensor_names import layer_of
from isthmus.families.architecture import from_settings
from isthmus.families.blocks.block import MicroBatch
from isthmus.families.registry import all_families
from ranks.tiny import SIZES
from ranks.tiny_families import delta_net, state_space

HYBRIDS = {name: tiny for name, tiny in (delta_net.FAMILIES | state_space.FAMILIES).items() if "qwen3_5" not in name}
TOKENS, HIDDEN = 4096, 1024
GPT = from_settings({
    "family": "gpt2", "num_layers": 4, "hidden_size": HIDDEN, "ffn_hidden_size": 4 * HIDDEN,
    "num_attention_heads": 16, "num_query_groups": 16, "kv_channels": 64, "vocab_size": 1000,
    "max_position_embeddings": TOKENS, "norm_epsilon": 1e-5, "position": "learned", "normalization": "LayerNorm",
    "activation": "gelu", "gated": False,
})  # fmt: skip


def test_weights_of_a_dense_layer() -> None:
    arch = from_settings({
        "family": "llama", "num_layers": 3, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4,
        "num_query_groups": 2, "kv_channels": 8, "vocab_size": 50, "max_position_embeddings": 64, "norm_epsilon": 1e-5,
    })  # fmt: skip
    # q 16x32, k and v 16x16 each, output 32x16, three feed-forward matrices 16x24
    assert arch.layers[0].matmul_weights == 512 + 512 + 512 + 1152


@pytest.mark.parametrize(("family", "case"), [(family, case) for family in HYBRIDS for case in HYBRIDS[family].logits])
def test_weights_of_hybrid_layers_are_those_of_their_tensors(family: str, case: str) -> None:
    tiny = HYBRIDS[family]
    arch = all_families()[family].to_architecture(SIZES | tiny.sizes | tiny.logits[case][0])
    expected = dict.fromkeys(range(arch.num_layers), 0.0)
    for name, placed in all_families()[family].placements(arch).items():
        shape = placed.rule.canonical_shape(arch)
        if (layer := layer_of(name)) is not None and len(shape) > 1 and not name.endswith("A_log"):
            share = 1 if arch.moe is None or not placed.rule.is_expert else arch.moe.top_k / arch.moe.num_experts
            expected[layer] += math.prod(shape) * share
    assert {layer.number: layer.matmul_weights for layer in arch.layers} == expected


def per_token_and_channel(**changes: Any) -> float:
    batch = MicroBatch(num_tokens=TOKENS, bytes_per_element=2, **changes)
    return sum(GPT.layers[0].saved_bytes(batch).values()) / TOKENS / HIDDEN


def test_gpt_layer_equals_the_paper_without_dropout_and_scores() -> None:
    """34 s b h, less its two dropout masks of a byte each; and 10 + 24 / t over t ranks, less the same."""
    # Norms 4, qkv reads 2, queries keys values 6, projection reads 2, feed-forward 2 + 8 + 8.
    assert per_token_and_channel() == pytest.approx(32, rel=0.001)


@pytest.mark.parametrize(("sp", "expected"), [(False, 8 + 24 / 4), (True, 32 / 4)])
def test_tensor_and_sequence_parallelism(sp: bool, expected: float) -> None:
    assert per_token_and_channel(tp=4, sp=sp) == pytest.approx(expected, rel=0.002)


def test_recomputed_activations_are_not_kept() -> None:
    assert per_token_and_channel(recomputed=frozenset({"core_attn"})) == per_token_and_channel()
    assert per_token_and_channel() - per_token_and_channel(recomputed=frozenset({"mlp"})) == 16


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 10 * 2 * (8 + 8)),  # keys and values of two groups
        ({"sliding_window": 4}, 4 * 2 * (8 + 8)),  # of the tokens in the window
        (  # latent vectors and rotated key channels
            {
                "mla.kv_lora_rank": 12,
                "mla.qk_nope_head_dim": 4,
                "mla.qk_rope_head_dim": 4,
                "mla.v_head_dim": 6,
            },
            10 * (12 + 4),
        ),
        (  # a state, and the inputs of the convolution
            {
                "mixers": (("mamba",),),
                "mamba.inner_size": 32,
                "mamba.state_size": 5,
                "mamba.time_step_rank": 2,
                "mamba.kernel": 4,
            },
            32 * (5 + 3),
        ),
    ],
)
def test_state_of_ten_tokens_in_generation(settings: dict[str, Any], expected: int) -> None:
    sizes = {"family": "", "num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4}
    sizes |= {"num_query_groups": 2, "kv_channels": 8, "vocab_size": 50, "max_position_embeddings": 64}
    arch = from_settings({**sizes, "norm_epsilon": 1e-5, **settings})
    (mixer,) = arch.layers[0].mixers
    assert mixer.state_elements(10) == expected
