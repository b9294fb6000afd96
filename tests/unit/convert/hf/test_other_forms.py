"""Files as transformers saves them: other names of norms or dense layers, and convolutions cut into thirds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from isthmus.convert.coverage import check_coverage
from isthmus.convert.hf.hf_weights import OpenedHfWeights, open_weights
from isthmus.errors import DataError
from isthmus.families.registry import family_for
from isthmus.hf.model_folder import ModelFolder
from ranks.tiny import build_model_folder

UNEVEN = {"linear_key_head_dim": 16, "linear_value_head_dim": 12, "layer_types": ["linear_attention", "full_attention"]}
MIXER = "model.layers.0.linear_attn."
QUERIES, KEYS, VALUES = (f"{MIXER}{name}_conv1d.weight" for name in "qkv")


def opened(folder: Path) -> OpenedHfWeights:
    model = ModelFolder.open(folder)
    return open_weights(model, family_for(model.config))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Widths of queries, keys and values are 32, 32 and 48; transformers saves 38, 38 and 36 rows."""
    return build_model_folder(tmp_path / "model", "olmo_hybrid", num_hidden_layers=2, names=False, **UNEVEN)


def test_thirds_become_queries_keys_and_values(saved: Path) -> None:
    stored, result = load_file(saved / "model.safetensors"), opened(saved)
    assert [stored[name].shape[0] for name in (QUERIES, KEYS, VALUES)] == [38, 38, 36]
    assert any("thirds" in note for note in result.notes)
    check_coverage(result.source, family_for(ModelFolder.open(saved).config), result.arch)
    full, read = torch.cat([stored[name] for name in (QUERIES, KEYS, VALUES)]), result.source.read
    for name, expected in zip((QUERIES, KEYS, VALUES), full.split([32, 32, 48]), strict=True):
        assert result.source.tensors[name].shape == expected.shape
        assert torch.equal(read(name), expected)
    rows: Tensor = torch.zeros(20, 1, 2)
    read(VALUES, (slice(2, 22), slice(0, 1), slice(1, 3)), into=rows)
    assert torch.equal(rows, full[66:86, :, 1:3])


def test_norms_of_attention_have_the_names_of_published_files(saved: Path) -> None:
    stored, result = load_file(saved / "model.safetensors"), opened(saved)
    renamed, remaining = (
        "model.layers.1.post_attention_layernorm.weight",
        "model.layers.0.feedforward_layer_norm.weight",
    )
    assert renamed not in stored
    assert torch.equal(result.source.read(renamed), stored["model.layers.1.feedforward_layer_norm.weight"])
    assert torch.equal(result.source.read(remaining), stored[remaining])


def test_other_totals_are_refused(saved: Path) -> None:
    config = ModelFolder.open(saved).config | {"linear_value_head_dim": 16}
    result = open_weights(ModelFolder.open(saved).with_config(config), family_for(config))
    with pytest.raises(DataError, match="of another shape"):
        check_coverage(result.source, family_for(config), result.arch)


@pytest.mark.slow
def test_dense_layers_of_kimi_linear(tmp_path: Path) -> None:
    """Published files have ``mlp`` in dense layers and ``block_sparse_moe`` in those with experts."""
    resaved = build_model_folder(tmp_path / "resaved", "kimi_linear", num_hidden_layers=2, names=False)
    published = build_model_folder(tmp_path / "published", "kimi_linear", num_hidden_layers=2)
    assert "model.layers.0.mlp.up_proj.weight" in load_file(published / "model.safetensors")
    assert "model.layers.1.block_sparse_moe.experts.0.w1.weight" in load_file(published / "model.safetensors")
    stored, result = load_file(resaved / "model.safetensors"), opened(resaved)
    check_coverage(result.source, family_for(ModelFolder.open(resaved).config), result.arch)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(result.source.read(name), stored["model.layers.0.block_sparse_moe.up_proj.weight"])
    assert not opened(published).notes
