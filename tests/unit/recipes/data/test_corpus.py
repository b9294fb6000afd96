from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.config.schema import RunConfig
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import load_tokenizer, save_tokenizer
from isthmus.recipes.data import corpus
from isthmus.recipes.data.data_sources import find_data_sources
from isthmus.train.stop import StopFlag


@pytest.mark.processes
def test_parts_that_a_killed_run_left_are_removed(tmp_path: Path) -> None:
    """A run may be killed after it has renamed the tokenized files, and before it has removed their parts."""
    file, folder, parts = tmp_path / "a.jsonl", tmp_path / "data", tmp_path / "data" / "train.partial"
    file.write_text(json.dumps({"text": "the sea"}))
    save_tokenizer(train_tokenizer(["the sea"], vocab_size=300), tmp_path / "tokenizer")
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    config = RunConfig.model_validate(
        {"recipe": "pretrain", "out": "o", "model": {"path": "m"}, "data": {"files": [str(file)]}}
    )
    for tokenized in ({"train"}, set()):
        sources = find_data_sources(config)
        arguments = (config, sources, folder, tokenizer, None, StopFlag(), lambda text: None)
        assert corpus._tokenize_sources(*arguments).keys() == tokenized
        assert not parts.exists() and (folder / "train.json").is_file()
        parts.mkdir()
        (parts / "00000.npz").touch()
