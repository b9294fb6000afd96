from __future__ import annotations

import pytest

from isthmus.families.architecture import from_settings
from isthmus.families.blocks.latent_attention import Latent
from isthmus.families.blocks.mamba import Mamba
from isthmus.families.blocks.mamba2 import Mamba2
from isthmus.train.flops import flops_per_batch

SMALL = from_settings({
    "family": "llama", "num_layers": 3, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4,
    "num_query_groups": 2, "kv_channels": 8, "vocab_size": 50, "max_position_embeddings": 64, "norm_epsilon": 1e-5,
    "rotary_base": 1e4,
})  # fmt: skip


def test_latent_attention_counted_by_hand() -> None:
    mla = Latent(kv_lora_rank=9, qk_nope_head_dim=6, qk_rope_head_dim=2, v_head_dim=5, q_lora_rank=11)
    latent = SMALL.with_settings({"mla": mla})
    # scores of 8 channels, values of 5
    without = 3 * (2 * 3 * latent.layers[0].matmul_weights * 10 + 2 * 16 * 50 * 10)
    assert flops_per_batch(latent, 10, 52) == without + 3 * 3 * 4 * (2 * 8 + 2 * 5) * 52 / 2


def test_one_batch_counted_by_hand() -> None:
    # two samples, of 6 and of 4 tokens
    layers = 2 * 3 * 2688 * 10
    attention = 3 * 4 * (2 * 8 + 2 * 8) * (36 + 16) / 2
    head = 2 * 16 * 50 * 10
    assert flops_per_batch(SMALL, 10, 52) == 3 * (layers + attention + head)
    assert flops_per_batch(SMALL, 10, 52, loss_tokens=4) == 3 * (layers + attention + head * 0.4)


def test_mtp_layer_has_a_head_and_a_projection() -> None:
    ahead = flops_per_batch(SMALL.with_settings({"mtp_layers": 1}), 10, 52)
    layer = 2 * 2688 * 10 + 4 * (2 * 8 + 2 * 8) * (36 + 16) / 2
    assert ahead - flops_per_batch(SMALL, 10, 52) == 3 * (layer + 2 * 16 * 50 * 10 + 2 * 32 * 16 * 10)


def test_a_large_model_is_about_six_per_parameter_and_token() -> None:
    llama_8b = from_settings({
        "family": "llama", "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32,
        "num_query_groups": 8, "kv_channels": 128, "vocab_size": 128256, "max_position_embeddings": 8192,
        "norm_epsilon": 1e-5, "rotary_base": 5e5,
    })  # fmt: skip
    weights = 8.03e9 - 128256 * 4096  # the embedding is looked up, not multiplied
    assert flops_per_batch(llama_8b, 1000, 0) == pytest.approx(6 * weights * 1000, rel=1e-3)


def test_packing_costs_less_than_one_long_sample_and_a_window_bounds_it() -> None:
    assert flops_per_batch(SMALL, 10, 52) < flops_per_batch(SMALL, 10, 100)
    windowed = SMALL.with_settings({"sliding_window": 2})
    assert flops_per_batch(windowed, 10, 100) == flops_per_batch(SMALL, 10, 40)
    every_other = windowed.with_settings({"full_attention_layers": (1,)})
    mixed = 2 * flops_per_batch(windowed, 10, 100) + flops_per_batch(SMALL, 10, 100)
    assert flops_per_batch(every_other, 10, 100) == pytest.approx(mixed / 3)


def test_recurrences_counted_by_hand() -> None:
    two = Mamba2(num_heads=4, head_dim=3, state_size=5, num_groups=2, kernel=2)
    item = Mamba(inner_size=6, state_size=5, time_step_rank=2, kernel=2)
    hybrid = SMALL.with_settings(
        {"mixers": (("attention",), ("mamba2",), ("attention", "mamba")), "mamba2": two, "mamba": item}
    )
    weights = sum(layer.matmul_weights for layer in hybrid.layers)
    attention = 2 * 4 * (2 * 8 + 2 * 8) * (36 + 16) / 2
    scans = 7 * 10 * (12 * 5 + 6 * 5)
    assert flops_per_batch(hybrid, 10, 52) == 3 * (2 * weights * 10 + attention + scans + 2 * 16 * 50 * 10)
