"""MTP layers survive conversions; MTP layers without weights are dropped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from isthmus.config.schema import RunConfig
from isthmus.convert.transfer import convert
from isthmus.families.registry import family_for
from isthmus.recipes.plan.model_plan import open_run_model, plan_model
from ranks.tiny import build_model_folder


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """As saved by transformers: an MTP layer in the config and none in the weights."""
    return build_model_folder(tmp_path / "hf", "deepseek_v3", num_hidden_layers=2, num_mtp_layers=1)


def complete(folder: Path) -> int:
    """Add the MTP layer to the weights; returns how many tensors it has."""
    config = json.loads((folder / "config.json").read_text())
    family = family_for(config)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    ahead = {
        name: shape for name, shape in family.hf_shapes(family.to_architecture(config)).items() if name not in tensors
    }
    tensors |= {name: torch.randn(shape) for name, shape in ahead.items()}
    save_file(tensors, file, {"format": "pt"})
    return len(ahead)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["torch_dist", "torch"])
def test_mtp_layers_survive_a_round_trip(saved: Path, to: str, tmp_path: Path) -> None:
    assert complete(saved) == 6 + 9 + 2 + 6 * 3 + 3
    convert(saved, tmp_path / "megatron", to)
    convert(tmp_path / "megatron", tmp_path / "back")
    before, after = load_file(saved / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 1


@pytest.mark.slow
def test_mtp_layers_without_weights_are_dropped(saved: Path, tmp_path: Path) -> None:
    convert(saved, tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "back")
    assert load_file(saved / "model.safetensors").keys() == load_file(tmp_path / "back" / "model.safetensors").keys()
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_mtp_layers_with_weights_are_trained(saved: Path) -> None:
    config = RunConfig.model_validate(
        {"recipe": "pretrain", "out": "unused", "model": {"path": str(saved)}, "data": {"files": ["unused"]}}
    )
    assert plan_model(open_run_model(config), config).architecture.pattern.mtp_layers == 0
    complete(saved)
    assert plan_model(open_run_model(config), config).architecture.pattern.mtp_layers == 1
