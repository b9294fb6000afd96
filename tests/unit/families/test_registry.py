"""The families of a program, and model types without a family."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import T5Config

import isthmus
from isthmus.cli.main import main
from isthmus.config.schema.model import ModelConfig
from isthmus.convert.legacy.model_from_args import architecture_from_args
from isthmus.errors import UsageError
from isthmus.families import registry
from isthmus.families.models import wrappers
from isthmus.families.models.llama import FAMILY as LLAMA
from isthmus.recipes.model.model_source import open_source


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    registry._REGISTERED.clear()


def test_registered_family_is_found() -> None:
    acme = isthmus.register_family(replace(LLAMA, name="acme"))
    assert registry.family_for({"model_type": "acme"}) is acme and next(iter(registry.all_families())) == "acme"
    with pytest.raises(UsageError, match="'acme' has a family already"):
        isthmus.register_family(acme)
    registered = isthmus.register_family(replace(LLAMA, hf_architecture="OwnForCausalLM"), replace=True)
    assert registry.family_for({"model_type": "llama"}) is registered


def test_registered_family_with_random_weights() -> None:
    isthmus.register_family(replace(LLAMA, name="acme"))
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = {"model_type": "acme", "vocab_size": 8, "max_position_embeddings": 8, **sizes}
    assert open_source(ModelConfig(config=config, init="random")).config["model_type"] == "acme"
    with pytest.raises(UsageError, match="does not use hidden_sizes"):
        open_source(ModelConfig(config=config | {"hidden_sizes": 8}, init="random"))


def test_a_table_without_embedding_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no rule for embedding\.word_embeddings\.weight"):
        isthmus.register_family(replace(LLAMA, name="acme", rules=LLAMA.rules[1:]))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with an entry point for a family."""
    site = tmp_path / "site"
    (site / "acme-1.0.dist-info").mkdir(parents=True)
    (site / "acme-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (site / "acme-1.0.dist-info/entry_points.txt").write_text("[isthmus.families]\nacme = acme_family:FAMILY\n")
    (site / "acme_family.py").write_text(
        "from dataclasses import replace\nfrom isthmus.families.models.llama import FAMILY\n"
        "FAMILY = replace(FAMILY, name='acme')\n"
    )
    monkeypatch.syspath_prepend(site)
    registry._installed.cache_clear()
    yield site
    registry._installed.cache_clear()
    sys.modules.pop("acme_family", None)


def test_families_of_installed_packages(installed: Path) -> None:
    assert registry.family_for({"model_type": "acme"}).hf_architecture == "LlamaForCausalLM"


def test_an_entry_point_that_is_no_family(installed: Path) -> None:
    (installed / "acme_family.py").write_text("FAMILY = 'llama'\n")
    with pytest.raises(UsageError, match="is no Family"):
        registry.all_families()


@pytest.mark.parametrize("verb", ["convert", "verify", "sft"])
def test_encoder_decoder_models_are_refused(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    T5Config(num_layers=1).save_pretrained(tmp_path / "t5")
    assert "is_encoder_decoder" in json.loads((tmp_path / "t5/config.json").read_text())
    folder, data = str(tmp_path / "t5"), tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    words = {
        "convert": [folder, str(tmp_path / "out")],
        "verify": [folder, folder],
        "sft": ["--model", folder, "--data", str(data), "--out", str(tmp_path / "out")],
    }
    assert main([verb, *words[verb]]) == 2
    assert "'t5' is an encoder-decoder model; only decoder-only models are supported" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_encoder_decoder_checkpoints_are_refused() -> None:
    with pytest.raises(UsageError, match=r"encoder-decoder model such as T5 \(decoder_seq_length=128\)"):
        architecture_from_args({"num_layers": 2, "hidden_size": 8, "decoder_seq_length": 128})


def test_a_folder_has_a_family_with_the_modules_of_its_own() -> None:
    shipped = registry.shipped_families()["gemma4_text"]
    assert shipped.module == "isthmus.families.models.gemma4.gemma4_text"
    assert shipped.about.startswith("Gemma 4, the text model")


def test_a_row_of_the_table_is_a_family() -> None:
    shipped = registry.shipped_families()["llava"]
    assert shipped.about == "LLaVA 1.5 and Pixtral: Llama, Mistral or Qwen2 behind a vision tower."
    assert registry.all_families()["llava"] is shipped.family and shipped.family.nested is not None


def test_no_model_type_has_two_families() -> None:
    rows = [family.name for family in wrappers.TABLE.values()]
    assert len({*rows}) == len(rows)
    assert {name for name, entry in registry.shipped_families().items() if entry.module == wrappers.__name__} == {*rows}


def test_the_module_of_a_family_has_its_name() -> None:
    modules = {name: entry.module for name, entry in registry.shipped_families().items()}
    assert all(modules[name].endswith(f".{name}") for name in modules if modules[name] != wrappers.__name__)
