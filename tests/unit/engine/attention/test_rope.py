"""Rotary embeddings equal those of transformers for every kind of scaling; gradients are correct."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.attention.rope import (
    frequency_sets,
    inverse_frequencies,
    magnitude,
    rotary_tables,
    rotate,
    rotation_table,
)
from isthmus.families.architecture import Architecture
from isthmus.families.registry import family_for

SIZES: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0, "original_max_position_embeddings": 4096}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "large-theta": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama-3.1": LLAMA3 | {"rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 8192},
    "llama-3.2": LLAMA3 | {"rope_theta": 500000.0, "factor": 32.0, "original_max_position_embeddings": 8192},
    # None of the constants is the one that Megatron-Core has fixed.
    "own-constants": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 3.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 9.0,
        "original_max_position_embeddings": 1000,
    },
    "yarn": YARN,
    "yarn-whole-context": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
    "yarn-not-rounded": YARN | {"truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn-two-scales": YARN | {"mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn-own-scale": YARN | {"attention_factor": 0.7, "mscale": 1.0, "mscale_all_dim": 0.707},
}


def frequencies_of(architecture: Architecture) -> torch.Tensor:
    (attention,) = architecture.attention_kinds
    assert attention.rotary is not None
    return inverse_frequencies(attention.rotary, attention.rotary_width)


def both(rope: str) -> tuple[LlamaConfig, Architecture]:
    config = LlamaConfig(**SIZES, max_position_embeddings=131072, rope_parameters=dict(ROPES[rope]))
    return config, family_for(config.to_dict()).to_architecture(config.to_dict())


@pytest.mark.parametrize("rope", ROPES)
def test_frequencies(rope: str) -> None:
    config, architecture = both(rope)
    ours, theirs = frequencies_of(architecture), LlamaRotaryEmbedding(config).inv_freq
    assert ours.dtype == torch.float32
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=0)


def test_every_scaling_differs_from_none() -> None:
    for rope in ("linear", "llama-3.1", "llama-3.2", "own-constants", "yarn", "yarn-not-rounded"):
        _, architecture = both(rope)
        plain = frequencies_of(architecture.with_settings({"rope_scaling": None}))
        assert not torch.allclose(frequencies_of(architecture), plain, rtol=0.1, atol=0)


@pytest.mark.parametrize("rope", ROPES)
def test_rotation(rope: str) -> None:
    config, architecture = both(rope)
    torch.manual_seed(0)
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 8191])  # two packed samples
    q, k = torch.randn(len(positions), 4, 64), torch.randn(len(positions), 2, 64)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    wanted_q, wanted_k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    scale = magnitude(architecture.rotary.rope_scaling)
    assert (scale != 1) == rope.startswith("yarn")
    table = rotation_table(frequencies_of(architecture), positions, torch.float32, magnitude=scale)
    # At position 8191 an angle in float32 is good to about 5e-4.
    assert torch.allclose(rotate(q, table)[:8], wanted_q[0].transpose(0, 1)[:8], atol=1e-5)
    assert torch.allclose(rotate(k, table)[:8], wanted_k[0].transpose(0, 1)[:8], atol=1e-5)
    assert torch.allclose(rotate(q, table), wanted_q[0].transpose(0, 1), atol=5e-3)


def test_angles_are_not_rounded_to_bf16() -> None:
    _, architecture = both("default")
    frequencies = frequencies_of(architecture)
    positions = torch.tensor([4097])
    near = rotation_table(frequencies, positions, torch.bfloat16).float()
    assert torch.allclose(near, rotation_table(frequencies, positions, torch.float32), atol=4e-3)


def test_interleaved_pairs_are_complex_numbers() -> None:
    torch.manual_seed(0)
    x, angles = torch.randn(5, 2, 3, 8), torch.rand(5, 4)
    turned = torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.polar(torch.ones(5, 4), angles)[:, None, None]
    table = torch.cat((angles.cos(), angles.sin()), -1)
    assert torch.allclose(rotate(x, table, interleaved=True), torch.view_as_real(turned).flatten(-2), atol=1e-6)
    assert not torch.allclose(rotate(x, table, interleaved=True), rotate(x, table), atol=1e-1)


@pytest.mark.parametrize("interleaved", [False, True])
def test_channels_beyond_the_table_are_not_rotated(interleaved: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 2, 8)
    table = rotation_table(torch.rand(2) + 1, torch.arange(5), torch.float32)
    turned = rotate(x, table, interleaved=interleaved)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert torch.equal(turned[..., :4], rotate(x[..., :4], table, interleaved=interleaved))


def packed(*lengths: int) -> PackedBatch:
    return PackedBatch.for_inference([torch.zeros(length, dtype=torch.int64) for length in lengths])


def test_layers_with_a_window_have_their_own_table() -> None:
    _, architecture = both("linear")
    layered = architecture.with_settings({"sliding_window": 5, "window_rotary_base": 77.0})
    tables = rotary_tables(layered, frequency_sets(layered), packed(9), torch.float32)
    window_layers = architecture.with_settings({"rotary_base": 77.0, "rope_scaling": None})
    for table, plain in zip(tables.chunk(2, dim=-1), (architecture, window_layers), strict=True):
        assert torch.equal(table, rotation_table(frequencies_of(plain), torch.arange(9), torch.float32))


@pytest.mark.parametrize("length", [15, 16, 17, 40])
def test_longrope_depends_on_the_length_of_each_sample(length: int) -> None:
    factors = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [4.0, 6.0, 8.0, 9.0]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16, **factors}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = Phi3Config(
        **sizes,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters=rope,
        pad_token_id=None,
    )
    architecture = family_for(config.to_dict()).to_architecture(config.to_dict())
    table = rotary_tables(architecture, frequency_sets(architecture), packed(3, length), torch.float32)
    for mine, count in zip(table.split((3, length)), (3, length), strict=True):
        cos, sin = Phi3RotaryEmbedding(config)(torch.zeros(1), torch.arange(count)[None])
        assert torch.allclose(mine, torch.cat((cos[0, :, :4], sin[0, :, :4]), -1), atol=1e-5)


@pytest.mark.parametrize("length", [15, 16, 17, 40])
def test_dynamic_scaling_depends_on_the_length_of_each_sample(length: int) -> None:
    config = LlamaConfig(
        **{"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 16},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 6.0},
    )
    architecture = family_for(config.to_dict()).to_architecture(config.to_dict())
    table = rotary_tables(architecture, frequency_sets(architecture), packed(3, length), torch.float32)
    for mine, count in zip(table.split((3, length)), (3, length), strict=True):
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(count)[None])
        assert torch.allclose(mine, torch.cat((cos[0, :, :4], sin[0, :, :4]), -1), atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradient_of_the_rotation(interleaved: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 2, 8, dtype=torch.float64, requires_grad=True)
    table = rotation_table(torch.rand(4), torch.arange(5), torch.float64, magnitude=1.3)
    assert torch.autograd.gradcheck(lambda inputs: rotate(inputs, table, interleaved=interleaved), (x,))
