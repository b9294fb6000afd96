"""An export has all files and config keys that readers need, and no stray weights."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from isthmus.convert.hf import hf_tensors
from isthmus.convert.online import export_plan
from isthmus.convert.transfer import convert
from isthmus.families.registry import all_families
from ranks.tiny import ARCHETYPES, build_model_folder

SMALL = {
    "tokenizer.json": '{ "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"} }',
    "tokenizer_config.json": '{"b": 1,\n"a": 2}',
    "tokenizer.model": "YQ== 0\n",
    "vocab.json": "{}",
    "merges.txt": "a b",
    "chat_template.jinja": "{{ messages }}\n",
    "special_tokens_map.json": "{}",
    "generation_config.json": '{"eos_token_id": [2, 7]}',
    "LICENSE": "yours",
}
STRAY = ["pytorch_model.bin", "consolidated.safetensors", "model.gguf", "optimizer.pt", "tokenizer.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ARCHETYPES)
def test_export_has_everything_that_readers_need(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, export = build_model_folder(tmp_path / "source", family, num_hidden_layers=2), tmp_path / "export"
    for name, text in SMALL.items():
        (source / name).write_text(text)
    for name in STRAY:
        (source / name).write_bytes(b"stray")
    monkeypatch.setattr(hf_tensors, "export_plan", partial(export_plan, max_shard_bytes=20_000))
    convert(source, export, "hf", dtype=torch.bfloat16)

    index = json.loads((export / "model.safetensors.index.json").read_text())
    shards = sorted(export.glob("*.safetensors"))
    assert len(shards) > 1 and {path.name for path in shards} == set(index["weight_map"].values())
    size = 0
    for path in shards:
        with safe_open(path, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert set(opened.keys()) == {name for name, file in index["weight_map"].items() if file == path.name}
            size += sum(opened.get_tensor(name).nbytes for name in opened.keys())
    assert index["metadata"]["total_size"] == size
    for name, text in SMALL.items():
        assert (export / name).read_text() == text
    assert not any((export / name).exists() for name in STRAY)

    config = json.loads((export / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    chosen = all_families()[family]
    if chosen.to_architecture(config).embedding.position == "rope":
        assert config["rope_parameters"]
        assert config[chosen.rope_names.get("rope_theta", "rope_theta")]
        assert "rope_scaling" in config
    _, loading_info = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not any(loading_info.values())


def test_shards_of_five_gigabytes_by_default() -> None:
    llama = all_families()["llama"]
    config = {"hidden_size": 2**14, "intermediate_size": 2**15, "num_hidden_layers": 3, "vocab_size": 2**17}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 64}
    plan = export_plan(llama, llama.to_architecture(config), torch.bfloat16)
    assert plan.total_bytes > 20e9
    assert 4 < len(plan.file_bytes) < 9
    assert max(plan.file_bytes.values()) < 5e9 + 10_000


def test_eos_ids_are_in_generation_config(tmp_path: Path) -> None:
    source = build_model_folder(tmp_path / "source", "llama", num_hidden_layers=1, bos_token_id=3, eos_token_id=[5, 6])
    (source / "generation_config.json").unlink()
    convert(source, tmp_path / "export", "hf")
    generation = json.loads((tmp_path / "export" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 3, "eos_token_id": [5, 6]}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert model.generation_config.eos_token_id == [5, 6]


def test_both_dtype_keys_are_written(tmp_path: Path) -> None:
    source = build_model_folder(tmp_path / "source", "llama", num_hidden_layers=1, dtype=torch.float16)
    path = source / "config.json"
    config = json.loads(path.read_text())
    for number, dtype_key in enumerate(({"torch_dtype": "float16"}, {})):
        path.write_text(json.dumps({key: value for key, value in config.items() if key != "dtype"} | dtype_key))
        convert(source, tmp_path / str(number), "hf")
        written = json.loads((tmp_path / str(number) / "config.json").read_text())
        assert written["dtype"] == written["torch_dtype"] == "float16"


def test_another_family_keeps_token_ids_and_drops_old_settings(tmp_path: Path) -> None:
    source = build_model_folder(tmp_path / "source", "mixtral", num_hidden_layers=1, eos_token_id=9)
    convert(source, tmp_path / "export", "hf", hf_family="isthmus")
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert (config["eos_token_id"], config["model_type"], config["num_experts"]) == (9, "isthmus", 6)
    assert config["architectures"] == ["IsthmusForCausalLM"]
    assert "num_local_experts" not in config and "rms_norm_eps" not in config
