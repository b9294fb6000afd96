from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isthmus.config.schema import RunConfig
from isthmus.data.chat.conversation_settings import ChatSettings
from isthmus.data.store.indexed_dataset import IndexedWriter
from isthmus.errors import DataError, MissingInput, UsageError
from isthmus.recipes.data.corpus import check_files
from isthmus.recipes.data.data_sources import (
    data_fingerprint,
    data_settings,
    find_data_sources,
    read_fingerprint,
    same_data,
)
from optional_packages import datasets


def tokenizer(template: str = "t", **vocabulary: int) -> Any:
    inner = SimpleNamespace(get_vocab=lambda: {"a": 0} | vocabulary)
    return SimpleNamespace(inner=inner, chat_template=template, bos_id=None, eos_id=0)


def config(*files: Path, recipe: str = "sft", **data: Any) -> RunConfig:
    names = {"files": [str(file) for file in files]}
    return RunConfig.model_validate({"recipe": recipe, "out": "o", "model": {"path": "m"}, "data": names | data})


def fingerprint(config: RunConfig, tokenizer: Any, earlier: dict[str, Any]) -> dict[str, Any]:
    return json.loads(
        json.dumps(data_fingerprint(data_settings(config), find_data_sources(config), tokenizer, earlier))
    )


def unchanged(config: RunConfig, tokenizer: Any, earlier: dict[str, Any]) -> bool:
    return same_data(fingerprint(config, tokenizer, earlier), earlier)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "chats.json"
    path.write_text("one")
    return path


def test_same_files_and_settings_have_the_same_fingerprint(file: Path) -> None:
    assert not unchanged(config(file), tokenizer(), {})
    record = fingerprint(config(file), tokenizer(), {})
    assert unchanged(config(file), tokenizer(), record)
    assert unchanged(config(file, packing=False, valid_fraction=0.5, seed=1), tokenizer(), record)
    for other in (config(file, seq_length=7), config(file, recipe="pretrain")):
        assert not unchanged(other, tokenizer(), record)
    assert not unchanged(config(file), tokenizer(b=1), record)
    assert not unchanged(config(file), tokenizer("u"), record)
    assert not unchanged(config(file, file), tokenizer(), record)


def test_validation_file_is_no_training_file(file: Path) -> None:
    record = fingerprint(config(file, file), tokenizer(), {})
    assert not unchanged(config(file, valid_files=[str(file)]), tokenizer(), record)


def test_fingerprint_depends_on_content_and_not_on_the_path(file: Path) -> None:
    record = fingerprint(config(file), tokenizer(), {})
    moved = file.rename(file.with_name("moved.json"))
    os.utime(moved, (1, 1))
    assert unchanged(config(moved), tokenizer(), record)
    moved.write_text("two")
    assert not unchanged(config(moved), tokenizer(), record)


def test_fingerprint_of_a_folder_contains_its_files(file: Path, tmp_path: Path) -> None:
    record = fingerprint(config(file), tokenizer(), {})
    assert unchanged(config(tmp_path), tokenizer(), record)
    assert unchanged(config(tmp_path / "*.json"), tokenizer(), record)
    (tmp_path / "more.json").write_text("two")
    assert not unchanged(config(tmp_path), tokenizer(), record)


def test_datasets_are_compared_by_content_or_hub_name(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(tmp_path / "set")
    both = config(tmp_path / "set", Path("hf:org/name:test"))
    record = fingerprint(both, tokenizer(), {})
    assert unchanged(both, tokenizer(), record)
    assert not unchanged(config(tmp_path / "set", Path("hf:org/name")), tokenizer(), record)
    datasets.Dataset.from_list([{"text": "b"}]).save_to_disk(tmp_path / "set")
    assert not unchanged(both, tokenizer(), record)


def test_unchanged_file_is_not_read_again(file: Path) -> None:
    record = fingerprint(config(file), tokenizer(), {})
    time_ns = file.stat().st_mtime_ns
    file.write_text("two")
    os.utime(file, ns=(time_ns, time_ns))
    assert unchanged(config(file), tokenizer(), record)


def test_damaged_fingerprint(tmp_path: Path) -> None:
    assert read_fingerprint(tmp_path / "source.json") == {}
    for text in ("{", "[]", '{"files": [1]}'):
        (tmp_path / "source.json").write_text(text)
        with pytest.raises(DataError, match=r"source\.json"):
            read_fingerprint(tmp_path / "source.json")


def test_missing_files_are_reported_early(file: Path, tmp_path: Path) -> None:
    check_files(config(file))
    with pytest.raises(MissingInput, match=r"gone\.json"):
        check_files(config(file, valid_files=[str(tmp_path / "gone.json")]))
    with pytest.raises(UsageError, match="is a folder with no data file"):
        (tmp_path / "empty").mkdir()
        check_files(config(file, tmp_path / "empty"))


def write_indexed(prefix: Path) -> Path:
    """Indexed files with the cache that Megatron-LM leaves in a folder of their name."""
    with IndexedWriter(prefix, "uint16") as writer:
        writer.add([1, 2, 3])
        writer.end_document()
        writer.close()
    cache = prefix / "cache" / "GPTDataset_indices"
    cache.mkdir(parents=True)
    for part in ("description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy"):
        (cache / f"{'0123456789abcdef' * 2}-GPTDataset-train-{part}").write_text("{}")
    return prefix


def test_indexed_files_win_over_the_folder_of_their_cache(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "text_document")
    for name in (prefix, prefix.with_suffix(".bin"), tmp_path, tmp_path / "text_*"):
        (source,) = find_data_sources(config(name, recipe="pretrain"))
        assert source.prepared
        assert source.files == (str(prefix),)


def test_indexed_files_win_over_a_folder_of_data_with_their_name(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "corpus")
    (prefix / "a.txt").write_text("text")
    (pair,) = find_data_sources(config(recipe="pretrain", files=[str(prefix)]))
    (folder,) = find_data_sources(config(recipe="pretrain", files=[f"{prefix}/"]))
    assert (pair.prepared, folder.prepared) == (True, False)


def test_cache_of_megatron_lm_is_never_data(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "text_document")
    prefix.with_suffix(".bin").unlink()
    for name in (f"{prefix}/", f"{prefix}/cache", f"{prefix}/**/*.txt"):
        with pytest.raises((UsageError, MissingInput), match="no data file"):
            find_data_sources(config(recipe="pretrain", files=[name]))


def test_unused_columns_are_reported_early(file: Path) -> None:
    check_files(config(file, columns={"text": "body", "messages": "dialog"}))
    with pytest.raises(UsageError, match=r"data\.columns: txt is not a known field.* Did you mean text\?"):
        check_files(config(file, columns={"txt": "body"}))
    with pytest.raises(UsageError, match=r"Did you mean text: body\?"):
        check_files(config(file, columns={"body": "text"}))


def test_runs_with_a_system_prompt_before_split_turns_have_the_same_fingerprint() -> None:
    earlier = {"system": "Be brief.", "override_system": False, "reasoning": "keep"}
    assert ChatSettings(system="Be brief.").as_record() == earlier
    assert ChatSettings(system="Be brief.", split_turns=False).as_record() == {**earlier, "split_turns": False}
