from __future__ import annotations

import math
from dataclasses import replace

import pytest

from isthmus.engine.tensor_names import layer_of
from isthmus.families.architecture import Architecture, Moe
from isthmus.families.mixer_sizes import Mamba, Mamba2, Mla
from isthmus.families.registry import all_families
from isthmus.train.flops import flops_per_batch, matmul_parameters
from ranks.tiny import SIZES
from ranks.tiny_families import delta_net, state_space

HYBRIDS = {name: tiny for name, tiny in (delta_net.FAMILIES | state_space.FAMILIES).items() if "qwen3_5" not in name}

SMALL = Architecture(
    family="llama", num_layers=3, hidden_size=16, ffn_hidden_size=24, num_attention_heads=4, num_query_groups=2,
    kv_channels=8, vocab_size=50, max_position_embeddings=64, norm_epsilon=1e-5, rotary_base=1e4,
)  # fmt: skip


def test_parameters_of_a_layer() -> None:
    # q 16x32, k and v 16x16 each, output 32x16, three feed-forward matrices 16x24
    assert matmul_parameters(SMALL, 0) == 512 + 512 + 512 + 1152


def test_an_mlp_without_a_gate_has_two_matrices() -> None:
    assert matmul_parameters(replace(SMALL, gated=False), 0) == 512 + 512 + 512 + 768


def test_parameters_of_a_layer_with_experts() -> None:
    moe = Moe(num_experts=6, top_k=2, ffn_hidden_size=5, shared_ffn_hidden_size=7, shared_gate=True, dense_layers=(0,))
    mixed = replace(SMALL, moe=moe)
    assert matmul_parameters(mixed, 0) == matmul_parameters(SMALL, 0)
    # two experts 5 wide and one 7 wide, each of three matrices; scores of 6 experts and of the shared one
    assert matmul_parameters(mixed, 1) == 512 + 512 + 512 + 3 * 16 * (2 * 5 + 7) + 16 * 7


def test_parameters_of_latent_attention() -> None:
    mla = Mla(kv_lora_rank=9, qk_nope_head_dim=6, qk_rope_head_dim=2, v_head_dim=5, q_lora_rank=11)
    latent = replace(SMALL, mla=mla)
    # queries 16 to 11 to 32, keys and values 16 to 9 + 2 and 9 to 4 (6 + 5), output 4 5 to 16
    attention = 16 * 11 + 11 * 32 + 16 * 11 + 9 * 44 + 20 * 16
    assert matmul_parameters(latent, 0) == attention + 1152
    direct = replace(SMALL, mla=replace(mla, q_lora_rank=None))
    assert matmul_parameters(direct, 0) == attention - 11 * 48 + 16 * 32 + 1152
    # scores of 8 channels, values of 5
    without = 3 * (2 * 3 * matmul_parameters(latent, 0) * 10 + 2 * 16 * 50 * 10)
    assert flops_per_batch(latent, 10, 52) == without + 3 * 3 * 4 * (2 * 8 + 2 * 5) * 52 / 2


def test_one_batch_counted_by_hand() -> None:
    # two samples, of 6 and of 4 tokens
    layers = 2 * 3 * 2688 * 10
    attention = 3 * 4 * (2 * 8 + 2 * 8) * (36 + 16) / 2
    head = 2 * 16 * 50 * 10
    assert flops_per_batch(SMALL, 10, 52) == 3 * (layers + attention + head)
    assert flops_per_batch(SMALL, 10, 52, loss_tokens=4) == 3 * (layers + attention + head * 0.4)


def test_mtp_layer_has_a_head_and_a_projection() -> None:
    ahead = flops_per_batch(replace(SMALL, mtp_layers=1), 10, 52)
    layer = 2 * 2688 * 10 + 4 * (2 * 8 + 2 * 8) * (36 + 16) / 2
    assert ahead - flops_per_batch(SMALL, 10, 52) == 3 * (layer + 2 * 16 * 50 * 10 + 2 * 32 * 16 * 10)


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
    every_other = replace(windowed, full_attention_layers=(1,))
    mixed = 2 * flops_per_batch(windowed, 10, 100) + flops_per_batch(SMALL, 10, 100)
    assert flops_per_batch(every_other, 10, 100) == pytest.approx(mixed / 3)


@pytest.mark.parametrize(("family", "case"), [(family, case) for family in HYBRIDS for case in HYBRIDS[family].logits])
def test_weights_of_hybrid_layers_are_those_of_their_tensors(family: str, case: str) -> None:
    tiny = HYBRIDS[family]
    arch = all_families()[family].to_architecture(SIZES | tiny.sizes | tiny.logits[case][0])
    wanted = dict.fromkeys(range(arch.num_layers), 0.0)
    for name, placed in all_families()[family].placements(arch).items():
        shape = placed.rule.canonical_shape(arch)
        if (layer := layer_of(name)) is not None and len(shape) > 1 and not name.endswith("A_log"):
            share = 1 if arch.moe is None or not placed.rule.is_expert else arch.moe.top_k / arch.moe.num_experts
            wanted[layer] += math.prod(shape) * share
    assert {layer: matmul_parameters(arch, layer) for layer in wanted} == wanted


def test_recurrences_counted_by_hand() -> None:
    two = Mamba2(num_heads=4, head_dim=3, state_size=5, num_groups=2, kernel=2)
    one = Mamba(inner_size=6, state_size=5, time_step_rank=2, kernel=2)
    hybrid = replace(SMALL, mixers=(("attention",), ("mamba2",), ("attention", "mamba")), mamba2=two, mamba=one)
    weights = sum(matmul_parameters(hybrid, layer) for layer in range(3))
    attention = 2 * 4 * (2 * 8 + 2 * 8) * (36 + 16) / 2
    scans = 7 * 10 * (12 * 5 + 6 * 5)
    assert flops_per_batch(hybrid, 10, 52) == 3 * (2 * weights * 10 + attention + scans + 2 * 16 * 50 * 10)
