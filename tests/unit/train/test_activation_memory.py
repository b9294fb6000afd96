"""The formula against the paper's arithmetic; tests/ranks compares it with autograd."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from isthmus.families.architecture import Architecture
from isthmus.families.mixer_sizes import Mla
from isthmus.train.activation_memory import layer_bytes, stage_bytes

TOKENS, HIDDEN = 4096, 1024
ARCHITECTURE = Architecture(
    family="gpt2", num_layers=4, hidden_size=HIDDEN, ffn_hidden_size=4 * HIDDEN, num_attention_heads=16,
    num_query_groups=16, kv_channels=64, vocab_size=1000, max_position_embeddings=TOKENS, norm_epsilon=1e-5,
    position="learned", normalization="LayerNorm", activation="gelu", gated=False,
)  # fmt: skip


def per_token_and_channel(**settings: Any) -> float:
    return layer_bytes(ARCHITECTURE, num_tokens=TOKENS, bytes_per_element=2, **settings) / TOKENS / HIDDEN


def test_gpt_layer_equals_the_paper_without_dropout_and_scores() -> None:
    """34 s b h, less its two dropout masks of a byte each; and 10 + 24 / t over t ranks, less the same."""
    # Norms 4, qkv reads 2, queries keys values 6, projection reads 2, feed-forward 2 + 8 + 8.
    assert per_token_and_channel() == pytest.approx(32, rel=0.001)


@pytest.mark.parametrize(("sp", "wanted"), [(False, 8 + 24 / 4), (True, 32 / 4)])
def test_tensor_and_sequence_parallelism(sp: bool, wanted: float) -> None:
    assert per_token_and_channel(tp=4, sp=sp) == pytest.approx(wanted, rel=0.002)


def test_recomputed_activations_are_not_kept() -> None:
    assert per_token_and_channel(recomputed=["core_attn"]) == per_token_and_channel()
    assert per_token_and_channel() - per_token_and_channel(recomputed=["mlp"]) == 16
    full = stage_bytes(
        ARCHITECTURE, num_layers=4, num_tokens=TOKENS, loss_tokens=0, bytes_per_element=2, first=False, last=False,
        recompute="full",
    )  # fmt: skip
    assert full == 4 * TOKENS * HIDDEN * 2


def test_other_layers_are_refused() -> None:
    narrow = Mla(kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
    with pytest.raises(ValueError, match="no layer with plain attention"):
        layer_bytes(replace(ARCHITECTURE, mla=narrow), num_tokens=1, bytes_per_element=2)
