"""Experts that transformers saves as [outputs, inputs], where published files have [inputs, outputs]."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from isthmus.convert.open_model import open_model
from isthmus.convert.transfer import convert
from isthmus.convert.verify.compare import compare_models
from ranks.tiny import build_model_folder, without_checksums


@pytest.mark.slow
def test_both_orders_are_the_same_model(tmp_path: Path) -> None:
    published = build_model_folder(tmp_path / "published", "qwen3_vl_moe", num_hidden_layers=2)
    saved = build_model_folder(tmp_path / "saved", "qwen3_vl_moe", num_hidden_layers=2)
    tensors = load_file(published / "model.safetensors")
    swapped = {name: item.mT.contiguous() if ".experts." in name else item for name, item in tensors.items()}
    assert swapped["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (6, 24, 32)
    save_file(swapped, without_checksums(saved) / "model.safetensors", {"format": "pt"})
    assert compare_models(published, saved).family == "qwen3_vl_moe"
    assert any("experts as [outputs, inputs]" in note for note in open_model(saved).notes)
    convert(saved, tmp_path / "export", "hf")
    exported = load_file(tmp_path / "export/model.safetensors")
    assert exported.keys() == tensors.keys() and all(
        torch.equal(exported[name], item) for name, item in tensors.items()
    )
