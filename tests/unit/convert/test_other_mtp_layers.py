"""MTP layers whose tensors have other names than DeepSeek-V3's: built and trained, or passed through bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from isthmus.convert.legacy.legacy_layout import LegacyLayout
from isthmus.convert.transfer import convert
from isthmus.convert.verify.compare import compare_models
from isthmus.errors import DataError, UsageError
from isthmus.families.registry import all_families
from ranks.tiny import add_mtp_layers, build_model_folder, load_network, tiny_config

PREFIXES = {"hy_v3": "model.layers.4.", "nemotron_h": "mtp.layers.", "mimo": "model.mtp_layers.0."}
MODULES = {
    "hy_v3": {
        *("enorm", "hnorm", "eh_proj", "final_layernorm", "input_layernorm", "post_attention_layernorm"),
        *("mlp.router.gate", "mlp.shared_mlp.down_proj", "mlp.experts.5.up_proj", "self_attn.q_norm"),
    },
    "nemotron_h": {
        *("0.enorm", "0.hnorm", "0.eh_proj", "0.norm", "0.mixer.q_proj", "0.mixer.o_proj"),
        *("1.norm", "1.mixer.gate", "1.mixer.experts.5.up_proj", "1.mixer.shared_experts.down_proj"),
        *("1.final_layernorm",),
    },
    "mimo": {
        *("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "input_layernorm"),
        *("post_attention_layernorm", "self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"),
    },
}
"""Some modules of the published files."""
PASSED = {
    "mimo_v2_flash": "model.mtp.layers.0.eh_proj",
    "ernie4_5_moe": "model.mtp_linear_proj.0",
    "exaone_moe": "mtp.fc",
    "mellum": "mtp.fc",
    "qwen3_next": "mtp.fc",
}


def with_mtp_layers(folder: Path, family: str) -> Path:
    """A model with one MTP layer of random weights."""
    build_model_folder(folder, family, **({"num_nextn_predict_layers": 1} if family == "mimo" else {}))
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder if family == "mimo" else add_mtp_layers(folder)


def with_tensor(folder: Path, family: str, name: str) -> Path:
    build_model_folder(folder, family)
    tensors = load_file(folder / "model.safetensors") | {name: torch.randn(3, 5).bfloat16()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def assert_same_bytes(expected: Path, result: Path) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in (expected, result))
    assert before.keys() == after.keys()
    assert all(
        before[name].dtype == tensor.dtype and torch.equal(before[name], tensor) for name, tensor in after.items()
    )


@pytest.mark.slow
@pytest.mark.sweep_cases("torch-mimo", "torch-nemotron_h", "torch-hy_v3")
@pytest.mark.parametrize("family", PREFIXES)
@pytest.mark.parametrize("to", ["torch_dist", "torch"])
def test_layers_that_are_built_survive_a_round_trip(family: str, to: str, tmp_path: Path) -> None:
    source = with_mtp_layers(tmp_path / "source", family)
    layout = LegacyLayout(tp=2, pp=2) if to == "torch" else None
    names = {name.removesuffix(".weight") for name in load_file(source / "model.safetensors")}
    assert {PREFIXES[family] + module for module in MODULES[family]} <= names
    assert not any("embed_tokens" in name for name in names if name.startswith(PREFIXES[family]))
    convert(source, tmp_path / "megatron", to, layout=layout)
    convert(tmp_path / "megatron", tmp_path / "back")
    assert_same_bytes(source, tmp_path / "back")
    assert json.loads((tmp_path / "back/config.json").read_text())["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize("family", PREFIXES)
def test_layers_without_weights_are_not_counted(family: str) -> None:
    config = tiny_config(family).to_dict() | {"num_nextn_predict_layers": 1}
    result = all_families()[family]
    assert result.to_architecture(config).pattern.mtp_layers == 1
    assert result.to_architecture(config, ()).pattern.mtp_layers == 0


@pytest.mark.slow
@pytest.mark.sweep_cases("mimo_v2_flash-torch_dist", "ernie4_5_moe-torch_dist")
@pytest.mark.parametrize(
    ("family", "to"),
    [
        ("mellum", "torch"),
        *((family, "torch_dist") for family in ("mimo_v2_flash", "ernie4_5_moe", "mellum")),
        *(pytest.param(family, "torch_dist", marks=pytest.mark.sweep) for family in ("exaone_moe", "qwen3_next")),
    ],
)
def test_layers_that_are_not_built_are_passed_through(family: str, to: str, tmp_path: Path) -> None:
    source = with_tensor(tmp_path / "source", family, f"{PASSED[family]}.weight")
    there = convert(source, tmp_path / "megatron", to)
    assert any("1 tensors of MTP layers" in note and "not computed or trained" in note for note in there.notes)
    assert (tmp_path / "megatron/hf/towers/model.safetensors").exists()
    convert(tmp_path / "megatron", tmp_path / "back")
    assert_same_bytes(source, tmp_path / "back")
    assert compare_models(source, tmp_path / "back").family == family
    load_network(tmp_path / "back")


def test_other_unexpected_tensors_are_refused(tmp_path: Path) -> None:
    source = with_tensor(tmp_path / "source", "exaone_moe", "model.mtp.fc.weight")
    with pytest.raises(DataError, match=r"unexpected.*model\.mtp\.fc\.weight"):
        convert(source, tmp_path / "megatron")


def test_further_layers_of_nemotron_are_refused() -> None:
    config = tiny_config("nemotron_h").to_dict()
    family = all_families()["nemotron_h"]
    with pytest.raises(UsageError, match="num_nextn_predict_layers=2 is not supported; 0 or 1 is"):
        family.to_architecture(config | {"num_nextn_predict_layers": 2})
    with pytest.raises(UsageError, match="MTP layers have attention and experts"):
        family.to_architecture(config | {"mtp_layers_block_type": ["mamba", "moe"]})
