"""Data sources of a run, and checks of prepared files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from isthmus.config.schema import RunConfig
from isthmus.data.store.indexed_dataset import IndexedWriter, write_manifest
from isthmus.errors import DataError, IsthmusError, MissingInput, UsageError
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import load_tokenizer, save_tokenizer
from isthmus.recipes.data import corpus
from isthmus.recipes.data.data_sources import DataSource, data_settings, find_data_sources, tokenizer_record
from isthmus.recipes.data.source_samples import open_samples, write_missing_manifests
from isthmus.train.stop import StopFlag


def tokenizer(template: str = "t", **vocabulary: int) -> Any:
    inner = SimpleNamespace(get_vocab=lambda: {"a": 0} | vocabulary)
    return SimpleNamespace(inner=inner, chat_template=template, bos_id=None, eos_id=0)


def config(recipe: str = "pretrain", **data: Any) -> RunConfig:
    return RunConfig.model_validate({"recipe": recipe, "out": "o", "model": {"path": "m"}, "data": data})


def pair(prefix: Path, *, kind: str | None = "text", masked: bool = False, **record: Any) -> str:
    with IndexedWriter(prefix, np.uint16, masked) as writer:
        for tokens in ([1, 2, 3, 4, 5], [6, 7, 8]):
            writer.add(tokens, [0, *[1] * (len(tokens) - 1)] if masked else None)
            writer.end_document()
    if kind:
        write_manifest(
            prefix, {"kind": kind, "tokenizer": tokenizer_record(tokenizer()), "pair": writer.close(), **record}
        )
    return str(prefix)


def only(*files: str, **settings: Any) -> DataSource:
    (source,) = find_data_sources(config(files=files, **settings))
    return source


def test_indexed_files_are_found_by_prefix_file_pattern_and_folder(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    a = pair(tmp_path / "d" / "a")
    b = pair(tmp_path / "d" / "b.c", masked=True, kind="chat")
    for names in (
        (a, b),
        (f"{a}.bin", f"{b}.idx"),
        (f"{tmp_path}/d/*.bin",),
        (str(tmp_path / "d"),),
        (a, f"{a}.idx", b),
    ):
        source = only(*names)
        assert (source.files, source.prepared) == ((a, b), True)
    (tmp_path / "d" / "c.partial").mkdir()
    (tmp_path / "d" / "c.partial" / "inputs.json").write_text("{}")
    pair(tmp_path / "d" / "c.partial" / "pair")
    for names in ((f"{tmp_path}/d/**",), (str(tmp_path / "d"),)):
        assert only(*names).files == (a, b)
    raw = tmp_path / "d" / "raw.jsonl"
    raw.write_text("{}")
    assert only(str(raw)).prepared is False
    for names in ((a, str(raw)), (str(tmp_path / "d"),), (f"{tmp_path}/d/*",)):
        with pytest.raises(UsageError, match=r"raw\.jsonl is a raw file, and .*a is prepared"):
            only(*names)
    with pytest.raises(MissingInput, match=r"gone: no such data file, and no"):
        only(a, str(tmp_path / "gone"))


def test_sets_and_validation_files_are_sources(tmp_path: Path) -> None:
    a, b = pair(tmp_path / "a"), pair(tmp_path / "b")
    sets = {"web": {"files": [a], "weight": 3}, "books": {"files": [b]}}
    sources = find_data_sources(config(sets=sets, valid_files=[b], test_files=[a]))
    assert [(source.use, source.name, source.weight) for source in sources] == [
        ("train", "web", 3.0),
        ("train", "books", 1.0),
        ("valid", "validation", 1.0),
        ("test", "test", 1.0),
    ]
    assert len({source.key for source in sources}) == 4


def test_texts_become_windows_and_chats_are_truncated(tmp_path: Path) -> None:
    text, chat = only(pair(tmp_path / "t")), only(pair(tmp_path / "c", kind="chat", masked=True))
    store, counts = open_samples(text, data_settings(config(files=["-"], seq_length=2)), tokenizer(), tmp_path)
    assert [store[k][0].tolist() for k in range(len(store))] == [[1, 2, 3], [3, 4, 5], [6, 7, 8]]
    assert counts.changes() == []
    store, counts = open_samples(chat, data_settings(config("sft", files=["-"], seq_length=2)), tokenizer(), tmp_path)
    assert [store[k][0].tolist() for k in range(len(store))] == [[1, 2, 3], [6, 7, 8]]
    assert counts.changes() == ["1 cut to seq_length"]
    store, counts = open_samples(
        chat, data_settings(config("sft", files=["-"], seq_length=2, overlong="drop")), tokenizer(), tmp_path
    )
    assert (len(store), counts.changes()) == (1, ["1 dropped as too long"])
    both = only(pair(tmp_path / "t"), pair(tmp_path / "u"))
    assert len(open_samples(both, data_settings(config(files=["-"])), tokenizer(), tmp_path)[0]) == 4


@pytest.mark.parametrize(("most", "samples"), [(1, [1, 3]), (2, [1, 3, 6]), (3, [1, 3, 6, 1, 3]), (9, [1, 3, 6] * 2)])
def test_the_first_documents_of_prepared_training_data(tmp_path: Path, most: int, samples: list[int]) -> None:
    source = only(pair(tmp_path / "t"), pair(tmp_path / "u"))
    settings = data_settings(config(files=["-"], seq_length=2, max_samples=most))
    store, _ = open_samples(source, settings, tokenizer(), tmp_path)
    assert [int(store[k][0][0]) for k in range(len(store))] == samples
    valid = find_data_sources(config(files=source.files, valid_files=source.files))[-1]
    assert len(open_samples(valid, settings, tokenizer(), tmp_path)[0]) == 6


@pytest.mark.parametrize(
    ("recipe", "pair_options", "tokenizer_options", "message"),
    [
        ("pretrain", {"kind": "chat", "masked": True}, {}, "of kind chat; pretrain needs text"),
        ("sft", {}, {}, "of kind text; sft needs chat, whose mask marks the loss tokens"),
        ("sft", {"kind": None}, {}, "kind text without a manifest; sft needs chat"),
        ("sft", {"kind": None, "masked": True}, {}, "kind masked without a manifest"),
        ("pretrain", {}, {"b": 1}, "with another tokenizer than this model's"),
        ("sft", {"kind": "chat", "masked": True}, {"template": "u"}, "with another chat template"),
        ("sft", {"kind": "chat", "masked": True, "loss_on": "all"}, {}, "with loss_on=all, the run has"),
    ],
)
def test_indexed_files_for_other_runs_are_errors(
    tmp_path: Path, recipe: str, pair_options: dict[str, Any], tokenizer_options: dict[str, Any], message: str
) -> None:
    source = only(pair(tmp_path / "p", **pair_options))
    (tmp_path / "run").mkdir()
    write_missing_manifests(source, tmp_path / "run")
    with pytest.raises(DataError, match=message):
        open_samples(
            source, data_settings(config(recipe, files=["-"])), tokenizer(**tokenizer_options), tmp_path / "run"
        )


def test_chat_template_is_not_compared_for_text(tmp_path: Path) -> None:
    assert open_samples(only(pair(tmp_path / "p")), data_settings(config(files=["-"])), tokenizer("other"), tmp_path)[0]


def test_indexed_files_without_a_manifest_are_read_once(tmp_path: Path) -> None:
    source = only(pair(tmp_path / "p", kind=None), pair(tmp_path / "q"))
    (tmp_path / "run").mkdir()
    assert write_missing_manifests(source, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["train-0.json"]
    store, _ = open_samples(source, data_settings(config(files=["-"])), tokenizer(), tmp_path / "run")
    assert store.max_token_id == 8
    (tmp_path / "p.bin").write_bytes((tmp_path / "p.bin").read_bytes()[:-2])
    with pytest.raises(IsthmusError, match=r"p\.bin: 14 bytes"):
        open_samples(source, data_settings(config(files=["-"])), tokenizer(), tmp_path / "run")


@pytest.mark.processes
def test_parts_that_a_killed_run_left_are_removed(tmp_path: Path) -> None:
    """A run may be killed after it has renamed the tokenized files, and before it has removed their parts."""
    file, folder, parts = tmp_path / "a.jsonl", tmp_path / "data", tmp_path / "data" / "train.partial"
    file.write_text(json.dumps({"text": "the sea"}))
    save_tokenizer(train_tokenizer(["the sea"], vocab_size=300), tmp_path / "tokenizer")
    opened = load_tokenizer(tmp_path / "tokenizer")
    settings = config(files=[str(file)])
    for tokenized in ({"train"}, set()):
        sources = find_data_sources(settings)
        arguments = (data_settings(settings), sources, folder, opened, None, StopFlag(), lambda text: None)
        assert corpus._tokenize_sources(*arguments).keys() == tokenized
        assert not parts.exists() and (folder / "train.json").is_file()
        parts.mkdir()
        (parts / "00000.npz").touch()
