"""Exports of models with code of their own, which transformers has no class for, load with that code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2ForCausalLM

from isthmus.convert.transfer import convert
from isthmus.hf.model_folder import ModelFolder
from isthmus.hf.modeling_code import folder_classes
from ranks.tiny import build_model_folder

CODE = """
from transformers import {base}Config, {base}ForCausalLM

class OwnConfig({base}Config):
    model_type = "{kind}"

class {name}({base}ForCausalLM):
    config_class = OwnConfig
"""
CLASSES = {"mimo": (Qwen2ForCausalLM, "Qwen2")}


def with_code(folder: Path, family: str) -> Path:
    """A folder as it is published, with a module that defines the classes, and a tokenizer with code."""
    build_model_folder(folder, family)
    _, base = CLASSES[family]
    (folder / "modeling_own.py").write_text(CODE.format(base=base, kind=family, name=f"Own{base}ForCausalLM"))
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [f"Own{base}ForCausalLM"]
    config["auto_map"] = {
        "AutoConfig": "modeling_own.OwnConfig",
        "AutoModelForCausalLM": f"modeling_own.Own{base}ForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("family", CLASSES)
def test_export_keeps_class_and_code(family: str, tmp_path: Path) -> None:
    source = with_code(tmp_path / "source", family)
    convert(source, tmp_path / "megatron")
    notes = convert(tmp_path / "megatron", tmp_path / "back").notes
    assert any("transformers has no class" in note for note in notes)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "back")]
    for key in ("model_type", "architectures", "auto_map"):
        assert configs[0][key] == configs[1][key]
    assert (tmp_path / "back/modeling_own.py").read_text() == (source / "modeling_own.py").read_text()
    _, loader = folder_classes(ModelFolder.open(tmp_path / "back"), trust_remote_code=True)
    assert issubclass(loader, CLASSES[family][0]) and loader.__module__.startswith("transformers_modules")
    _, loading = loader.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(loading.values())
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_code_that_is_missing_is_not_named(tmp_path: Path) -> None:
    source = with_code(tmp_path / "source", "mimo")
    (source / "modeling_own.py").unlink()
    convert(source, tmp_path / "back", to="hf")
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert "auto_map" not in config and config["architectures"] == ["OwnQwen2ForCausalLM"]


def test_code_of_a_class_of_transformers_is_left_out(tmp_path: Path) -> None:
    source = build_model_folder(tmp_path / "source", "qwen2")
    (source / "modeling_own.py").write_text("")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "modeling_own.OwnConfig"}}))
    convert(source, tmp_path / "back", to="hf")
    assert "auto_map" not in json.loads((tmp_path / "back/config.json").read_text())
    assert not (tmp_path / "back/modeling_own.py").exists()


@pytest.mark.slow
def test_tokenizer_keeps_its_code(tmp_path: Path) -> None:
    source = build_model_folder(tmp_path / "source", "qwen2")
    (source / "tokenization_own.py").write_text("class OwnTokenizer: ...\n")
    names = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}, "model_max_length": int(1e30)}
    (source / "tokenizer_config.json").write_text(json.dumps(names))
    convert(source, tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "back")
    assert (tmp_path / "back/tokenization_own.py").exists()
