"""The checks of a run come in one order, for the run and its dry run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus.config.schema import RunConfig
from isthmus.errors import DataError, IsthmusError, MissingInput, OutputExists, UsageError
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import save_tokenizer
from isthmus.recipes.dry_run import dry_run
from isthmus.recipes.plan.validation import validate
from ranks.tiny import build_model_folder


@pytest.mark.slow
def test_a_user_sees_errors_in_the_documented_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two calls are compared word for word, and the free memory is one of the words.
    monkeypatch.setattr("isthmus.platforms.base.free_bytes", lambda: 16 << 30)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    save_tokenizer(train_tokenizer(["the sea is blue " * 9], vocab_size=300), tokenizer)
    sound = build_model_folder(tmp_path / "sound", "llama", num_hidden_layers=1, vocab_size=300)
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "thesis.txt").touch()
    data = tmp_path / "chats.json"
    data.write_text("[]")
    sections: dict[str, Any] = {
        "recipe": "sft", "out": str(tmp_path / "occupied"), "model": {"path": str(tmp_path / "nowhere")},
        "data": {"files": [str(tmp_path / "missing.json")], "seq_length": 16}, "platform": "cpu",
        "train": {"steps": 1, "precision": "fp8", "recompute": "full", "recompute_layers": 9},
        "optim": {"offload": True}, "parallel": {"tp": 3},
    }  # fmt: skip
    # Each error, and the change that leads to the next one.
    steps: list[tuple[type[IsthmusError], str, dict[str, Any]]] = [
        (OutputExists, "is not a run folder", {"out": str(tmp_path / "out")}),
        (MissingInput, "nowhere", {"model": {"path": str(sound)}}),
        (UsageError, "tp=3", {"parallel": {"tp": 2}}),
        (UsageError, "do not divide the 1 ranks", {"parallel": {}}),
        (UsageError, "recompute_layers=9", {"train": {"steps": 1, "precision": "fp8"}}),
        (MissingInput, "missing.json", {"data": {"files": [str(data)], "seq_length": 16}}),
        (MissingInput, "has no tokenizer", {"tokenizer": {"path": str(tokenizer)}}),
        (UsageError, "precision=fp8", {"train": {"steps": 1, "precision": "fp32"}}),
        (UsageError, "optim.offload=true", {"optim": {}, "train": {"steps": 1, "attention": "varlen"}}),
        (UsageError, "train.attention=varlen .* no CPU kernel", {"train": {"steps": 1, "precision": "fp32"}}),
    ]
    for kind, message, change in steps:
        config = RunConfig.model_validate(sections)
        with pytest.raises(kind, match=message) as caught:
            validate(config, world_size=1, ranks_here=1)
        with pytest.raises(kind) as same:
            dry_run(config, world_size=1, ranks_here=1, report=[].append)
        assert str(same.value) == str(caught.value)
        sections |= change
    config = RunConfig.model_validate(sections)
    context = validate(config, world_size=1, ranks_here=1)
    assert (context.precision, context.resume) == ("fp32", None)
    assert {"layout: tp=1 pp=1 dp=1", "precision fp32: train.precision"} <= set(context.messages)
    data.write_text('[{"prompt": "the sea", "completion": "is blue"}]')
    lines: list[str] = []
    with pytest.raises(DataError, match=r"no sample is left to train on \(seq_length=16\)"):
        dry_run(config, world_size=1, ranks_here=1, report=lines.append)
    lines.clear()
    config = RunConfig.model_validate(sections | {"data": {"files": [str(data)], "seq_length": 64}})
    context = validate(config, world_size=1, ranks_here=1)
    dry_run(config, world_size=1, ranks_here=1, report=lines.append)
    assert tuple(lines[: len(context.messages)]) == context.messages and not (tmp_path / "out").exists()
    assert any(line.startswith("data: 1 file, the first records: 1 record -> 1 sample,") for line in lines)
    *_, few, size = lines
    assert "the data has 1 sequence and train.global_batch_size=" in few
    assert size.startswith("training: 1 step, about ") and "parameters" in size
