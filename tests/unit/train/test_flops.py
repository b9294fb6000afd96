from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.families.architecture import Architecture
from isthmus.train.flops import flops_per_batch, matmul_parameters_per_layer

SMALL = Architecture(
    family="llama", num_layers=3, hidden_size=16, ffn_hidden_size=24, num_attention_heads=4, num_query_groups=2,
    kv_channels=8, vocab_size=50, max_position_embeddings=64, norm_epsilon=1e-5, rotary_base=1e4,
)  # fmt: skip


def test_parameters_of_a_layer() -> None:
    # q 16x32, k and v 16x16 each, output 32x16, three feed-forward matrices 16x24
    assert matmul_parameters_per_layer(SMALL) == 512 + 512 + 512 + 1152


def test_an_mlp_without_a_gate_has_two_matrices() -> None:
    assert matmul_parameters_per_layer(replace(SMALL, gated=False)) == 512 + 512 + 512 + 768


def test_one_batch_counted_by_hand() -> None:
    # two samples, of 6 and of 4 tokens
    layers = 2 * 3 * 2688 * 10
    attention = 3 * 4 * (2 * 8 + 2 * 8) * (36 + 16) / 2
    head = 2 * 16 * 50 * 10
    assert flops_per_batch(SMALL, 10, 52) == 3 * (layers + attention + head)
    assert flops_per_batch(SMALL, 10, 52, learned_tokens=4) == 3 * (layers + attention + head * 0.4)


def test_a_large_model_is_about_six_per_parameter_and_token() -> None:
    llama_8b = Architecture(
        family="llama", num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32,
        num_query_groups=8, kv_channels=128, vocab_size=128256, max_position_embeddings=8192, norm_epsilon=1e-5,
        rotary_base=5e5,
    )  # fmt: skip
    weights = 8.03e9 - 128256 * 4096  # the embedding is looked up, not multiplied
    assert flops_per_batch(llama_8b, 1000, 0) == pytest.approx(6 * weights * 1000, rel=1e-3)


def test_packing_costs_less_than_one_long_sample_and_a_window_bounds_it() -> None:
    assert flops_per_batch(SMALL, 10, 52) < flops_per_batch(SMALL, 10, 100)
    windowed = replace(SMALL, sliding_window=2)
    assert flops_per_batch(windowed, 10, 100) == flops_per_batch(SMALL, 10, 40)
    mixed = replace(windowed, full_attention_layers=(1,))
    of_windows, of_all = (flops_per_batch(shape, 10, 100) for shape in (windowed, SMALL))
    assert flops_per_batch(mixed, 10, 100) == pytest.approx((2 * of_windows + of_all) / 3)
