"""The families of a program, and model types without a family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import T5Config

import isthmus
from isthmus.cli.main import main
from isthmus.errors import UsageError
from isthmus.families import registry
from isthmus.families.models.llama import FAMILY as LLAMA


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    registry._REGISTERED.clear()


def test_registered_family_is_found() -> None:
    acme = isthmus.register_family(replace(LLAMA, name="acme"))
    assert registry.family_for({"model_type": "acme"}) is acme and next(iter(registry.all_families())) == "acme"
    with pytest.raises(UsageError, match="'acme' has a family already"):
        isthmus.register_family(acme)
    own = isthmus.register_family(replace(LLAMA, hf_architecture="OwnForCausalLM"), replace=True)
    assert registry.family_for({"model_type": "llama"}) is own


def test_a_table_without_embedding_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no rule for embedding\.word_embeddings\.weight"):
        isthmus.register_family(replace(LLAMA, name="acme", rules=LLAMA.rules[1:]))


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
