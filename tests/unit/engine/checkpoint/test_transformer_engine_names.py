"""Keys of torch_dist checkpoints with TransformerEngine's names.

The lists are those that ``sharded_state_dict`` of Megatron-Core 0.16.1 yields for what
``get_gpt_layer_with_transformer_engine_spec`` names (``megatron/core/models/gpt/gpt_layer_specs.py``): a norm is part
of the projection behind it (``TELayerNormColumnParallelLinear``), except before experts; in latent attention it is the
norms of the narrow vectors that are. Layers that are all alike are stacked; the experts of a layer always are.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.convert.torch_dist.from_torch_dist import TorchDistFolder
from isthmus.convert.transfer import convert
from ranks.tiny import build_model_folder

ENDS = {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"}
ATTENTION = {"self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_qkv.weight"} | {
    "self_attention.linear_proj.weight"
}
DENSE = {"mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"}
MOE = {"pre_mlp_layernorm.weight", "mlp.router.weight"} | {
    "mlp.experts.experts.linear_fc1.weight",
    "mlp.experts.experts.linear_fc2.weight",
}
SHARED = {"mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight"}
LATENT = {
    "input_layernorm.weight",
    "self_attention.linear_q_down_proj.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.linear_q_up_proj.weight",
    "self_attention.linear_kv_down_proj.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight",
    "self_attention.linear_kv_up_proj.weight",
    "self_attention.linear_proj.weight",
}
STACKED = {
    "llama": ATTENTION | DENSE,
    "qwen3": ATTENTION | DENSE | {"self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"},
    "mixtral": ATTENTION | MOE,
    "qwen2_moe": ATTENTION | MOE | SHARED | {"self_attention.linear_qkv.bias", "mlp.shared_experts.gate_weight"},
}


@pytest.mark.slow_cases("mixtral", "qwen2_moe")
@pytest.mark.parametrize("family", STACKED)
def test_homogeneous_layers(family: str, tmp_path: Path) -> None:
    expected = ENDS | {f"decoder.layers.{name}" for name in STACKED[family]}
    keys = _keys(family, tmp_path)
    assert expected <= keys
    # Megatron-Core's own layers look for the norm before experts here.
    additional = (
        {"decoder.layers.mlp.linear_fc1.layer_norm_weight"} if "moe" in family or family == "mixtral" else set()
    )
    assert keys - expected == additional


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_heterogeneous_layers(family: str, tmp_path: Path) -> None:
    moe = LATENT | MOE | SHARED | ({"mlp.router.expert_bias"} if family == "deepseek_v3" else set())
    expected = ENDS | {f"decoder.layers.0.{name}" for name in LATENT | DENSE}
    expected |= {f"decoder.layers.{layer}.{name}" for layer in (1, 2, 3) for name in moe}
    keys = _keys(family, tmp_path)
    assert expected <= keys
    # Those of Megatron-Core's own layers have all their norms under their own names.
    assert all("layernorm" in key for key in keys - expected)


def _keys(family: str, folder: Path) -> set[str]:
    convert(build_model_folder(folder / "hf", family, tie_word_embeddings=False), folder / "there")
    return set(TorchDistFolder(folder / "there" / "release").tensors)
