from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest

from isthmus.config.schema import RunConfig
from isthmus.errors import DataError, MissingInput, UsageError
from isthmus.recipes.data.corpus import check_files
from isthmus.recipes.data.data_fingerprint import DataFingerprint, read_fingerprint
from isthmus.recipes.data.data_sources import find_data_sources


def tokenizer(template: str = "t", **vocabulary: int) -> Any:
    inner = SimpleNamespace(get_vocab=lambda: {"a": 0} | vocabulary)
    return SimpleNamespace(inner=inner, chat_template=template, bos_id=None, eos_id=0)


def config(*files: Path, recipe: str = "sft", **data: Any) -> RunConfig:
    names = {"files": [str(file) for file in files]}
    return RunConfig.model_validate({"recipe": recipe, "out": "o", "model": {"path": "m"}, "data": names | data})


def origin(config: RunConfig, tokenizer: Any, earlier: dict[str, Any]) -> DataFingerprint:
    return DataFingerprint.of(config, find_data_sources(config), tokenizer, earlier)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "chats.json"
    path.write_text("one")
    return path


def test_same_files_in_the_same_way(file: Path) -> None:
    first = origin(config(file), tokenizer(), {})
    assert not first.unchanged
    record = json.loads(json.dumps(first.record))
    assert origin(config(file), tokenizer(), record).unchanged
    assert origin(config(file, packing=False, valid_fraction=0.5, seed=1), tokenizer(), record).unchanged
    for other in (config(file, seq_length=7), config(file, recipe="pretrain")):
        assert not origin(other, tokenizer(), record).unchanged
    assert not origin(config(file), tokenizer(b=1), record).unchanged
    assert not origin(config(file), tokenizer("u"), record).unchanged
    assert not origin(config(file, file), tokenizer(), record).unchanged


def test_held_out_file_is_no_training_file(file: Path) -> None:
    record = origin(config(file, file), tokenizer(), {}).record
    assert not origin(config(file, valid_files=[str(file)]), tokenizer(), record).unchanged


def test_moved_file_is_the_same_and_changed_one_is_not(file: Path) -> None:
    record = origin(config(file), tokenizer(), {}).record
    moved = file.rename(file.with_name("moved.json"))
    os.utime(moved, (1, 1))
    assert origin(config(moved), tokenizer(), record).unchanged
    moved.write_text("two")
    assert not origin(config(moved), tokenizer(), record).unchanged


def test_folder_is_the_files_in_it(file: Path, tmp_path: Path) -> None:
    record = origin(config(file), tokenizer(), {}).record
    assert origin(config(tmp_path), tokenizer(), record).unchanged
    assert origin(config(tmp_path / "*.json"), tokenizer(), record).unchanged
    (tmp_path / "more.json").write_text("two")
    assert not origin(config(tmp_path), tokenizer(), record).unchanged


def test_data_sets_are_told_by_what_is_in_them_or_by_their_name(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(tmp_path / "set")
    both = config(tmp_path / "set", Path("hf:org/name:test"))
    record = origin(both, tokenizer(), {}).record
    assert origin(both, tokenizer(), record).unchanged
    assert not origin(config(tmp_path / "set", Path("hf:org/name")), tokenizer(), record).unchanged
    datasets.Dataset.from_list([{"text": "b"}]).save_to_disk(tmp_path / "set")
    assert not origin(both, tokenizer(), record).unchanged


def test_file_is_not_read_again_while_nothing_hints_at_a_change(file: Path) -> None:
    record = origin(config(file), tokenizer(), {}).record
    time_ns = file.stat().st_mtime_ns
    file.write_text("two")
    os.utime(file, ns=(time_ns, time_ns))
    assert origin(config(file), tokenizer(), record).unchanged


def test_record_that_is_damaged(tmp_path: Path) -> None:
    assert read_fingerprint(tmp_path / "source.json") == {}
    for text in ("{", "[]", '{"files": [1]}'):
        (tmp_path / "source.json").write_text(text)
        with pytest.raises(DataError, match=r"source\.json"):
            read_fingerprint(tmp_path / "source.json")


def test_absent_files_are_named_early(file: Path, tmp_path: Path) -> None:
    check_files(config(file))
    with pytest.raises(MissingInput, match=r"gone\.json"):
        check_files(config(file, valid_files=[str(tmp_path / "gone.json")]))
    with pytest.raises(UsageError, match="is a folder with no data file"):
        (tmp_path / "empty").mkdir()
        check_files(config(file, tmp_path / "empty"))


def test_columns_that_nothing_reads_are_named_early(file: Path) -> None:
    check_files(config(file, columns={"text": "body", "messages": "dialog"}))
    with pytest.raises(UsageError, match=r"data\.columns: txt: .* Did you mean text\?"):
        check_files(config(file, columns={"txt": "body"}))
    with pytest.raises(UsageError, match=r"Did you mean text: body\?"):
        check_files(config(file, columns={"body": "text"}))
