"""The data sources of a run, and the fingerprint of tokenized data, with which a resumed run detects changes.

Files are compared by content: on another machine, paths and times differ.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from isthmus.config.schema import RunConfig
from isthmus.config.schema.data import DOCUMENT_SETTINGS, DataConfig
from isthmus.data.chat.conversation_settings import UNCHANGED, ChatSettings
from isthmus.data.readers.data_names import PARTIAL, is_hub_name
from isthmus.data.readers.file_sources import find_sources, is_data_file
from isthmus.data.store.indexed_dataset import find_prefix
from isthmus.data.store.manifest import SUFFIXES, indexed_file
from isthmus.data.tokenize.stats import Overlong
from isthmus.errors import DataError, MissingInput, UsageError
from isthmus.files.remote_files import file_bytes, is_url, remote_version
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.recipes.recipe import Recipe
from isthmus.recipes.registry import recipe_of

Report = Callable[[str], None]
Use = Literal["train", "valid", "test"]
_HASHED_BYTES = 1 << 20
"""Read at a time."""


@dataclass(frozen=True, slots=True)
class DataSource:
    """One dataset: either raw files, or indexed files from ``isthmus prepare`` or Megatron."""

    use: Use
    name: str
    """In messages: data, the name of a set, validation, or test."""
    key: str
    """Prefix of its files in the run folder."""
    files: tuple[str, ...]
    """Raw files as given; indexed files as prefixes."""
    prepared: bool
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class DataSettings:
    """The settings of a run that decide its samples."""

    recipe: Recipe
    data: DataConfig
    chat: ChatSettings
    answer_tokens: int = 0
    """Room for an answer that is generated."""

    @property
    def most_targets(self) -> int:
        """Most targets of a sample, which has one token more. A reward model also reads the last token."""
        return self.data.seq_length - self.recipe.trains_scores - self.answer_tokens

    @property
    def overlong(self) -> Overlong:
        """``data.overlong``; a prompt is never truncated."""
        is_prompt = self.recipe.records.has_columns
        return "drop" if is_prompt and self.data.overlong == "truncate" else self.data.overlong


def data_settings(config: RunConfig) -> DataSettings:
    recipe = recipe_of(config)
    answer_tokens = config.rollout.max_new_tokens if recipe.generates_answers else 0
    return DataSettings(recipe, config.data, chat_settings(config), answer_tokens)


def find_data_sources(config: RunConfig, tokenized: Path | None = None) -> list[DataSource]:
    """The data sources of a run; raw files in ``tokenized``, the data folder of the run, need not exist any more."""
    data = config.data

    def source(use: Use, name: str, key: str, files: Sequence[str], weight: float = 1.0) -> DataSource:
        if tokenized is not None and indexed_file(tokenized / key, ".idx").is_file():
            return DataSource(use, name, key, tuple(files), False, weight)
        return find_source(use, name, key, files, weight)

    sources = [
        source("train", name, f"set-{k}", data_set.files, data_set.weight)
        for k, (name, data_set) in enumerate(data.sets.items())
    ]
    rest: list[tuple[Use, str, Sequence[str]]] = [
        ("train", "data", data.files),
        ("valid", "validation", data.valid_files),
        ("test", "test", data.test_files),
    ]
    sources += [source(use, name, use, files) for use, name, files in rest if files]
    if data.columns and sources and all(source.prepared for source in sources):
        raise UsageError("data.columns names fields of records, and prepared files have no fields. Omit it.")
    return sources


def find_source(use: Use, name: str, key: str, files: Sequence[str], weight: float = 1.0) -> DataSource:
    """The files of one data set, whether raw or prepared; UsageError for both, MissingInput for none."""
    names = [expanded for file in files for expanded in _expand(file)]
    prefixes = [find_prefix(file) for file in names]
    if not any(prefixes):
        find_sources(names)
        return DataSource(use, name, key, tuple(names), False, weight)
    raw = [file for file, prefix in zip(names, prefixes, strict=True) if prefix is None]
    if raw:
        if not os.path.exists(raw[0]):
            raise MissingInput(f"{raw[0]}: no such data file, and no {raw[0]}.bin with {raw[0]}.idx.")
        raise UsageError(
            f"{name}: {raw[0]} is a raw file, and {next(filter(None, prefixes))} is prepared. Prepare both, or name "
            "them as two sets under data.sets."
        )
    return DataSource(use, name, key, tuple(dict.fromkeys(str(prefix) for prefix in prefixes)), True, weight)


def _expand(name: str) -> list[str]:
    """The files of a pattern or of a folder with indexed files; else the name."""
    if not os.path.exists(name) and glob.has_magic(name):
        matches = [file for file in sorted(glob.glob(name, recursive=True)) if not _is_partial(Path(file))]
        indexed = [match for match in matches if match.endswith((".idx", ".bin"))]
        raw = [match for match in matches if is_data_file(Path(match))] if indexed else []
        return indexed + raw or [name]
    is_folder = os.path.isdir(name) and find_prefix(name) is None
    below = sorted(Path(name).rglob("*.idx")) if is_folder else []
    indexed = [str(path) for path in below if not _is_partial(path)]
    if not indexed:
        return [name]
    raw = []
    with contextlib.suppress(UsageError):  # no raw files
        raw = find_sources([name]).names
    return indexed + raw


def _is_partial(path: Path) -> bool:
    return path.parent.name.endswith(PARTIAL)


# Paths; and splitting, mixing, packing and padding, which come after tokenization.
_IRRELEVANT = {"files", "sets", "valid_files", "test_files", "valid_fraction", "test_fraction", "seed"}
_IRRELEVANT |= {"packing", "length_buckets", *DOCUMENT_SETTINGS}
_FORMAT = 3
"""Format of the files in the run folder."""


def data_fingerprint(
    settings: DataSettings, sources: Sequence[DataSource], tokenizer: Tokenizer, earlier: dict[str, Any]
) -> dict[str, Any]:
    """The fingerprint of the data; files with the same path, size and time as in ``earlier`` are not read."""
    known = known_digests(earlier)
    files = [[file_record(name, known) for name in _files_of(source)] for source in sources]
    values, chat = settings.data.model_dump(mode="json"), settings.chat
    return {
        "format": _FORMAT,
        "sources": [
            [source.use, len(records), source.prepared] for source, records in zip(sources, files, strict=True)
        ],
        "files": [file for records in files for file in records],
        "tokenizer": tokenizer_record(tokenizer),
        "recipe": settings.recipe.name,
        **({"answer_tokens": settings.answer_tokens} if settings.answer_tokens else {}),
        "settings": {name: values[name] for name in sorted(values) if name not in _IRRELEVANT},
        **({} if chat == UNCHANGED else {"chat": chat.as_record()}),
    }


def chat_settings(config: RunConfig) -> ChatSettings:
    """The settings of ``config`` that change conversations."""
    return ChatSettings(**config.chat.model_dump(exclude={"template"}))


def same_data(record: dict[str, Any], earlier: dict[str, Any]) -> bool:
    """Ignores the paths of the files."""
    return _content(record) == _content(earlier)


def _content(record: dict[str, Any]) -> dict[str, Any]:
    return record | {"files": [file["digest"] for file in record.get("files", [])]}


def changed_files(record: dict[str, Any], earlier: dict[str, Any]) -> list[str]:
    """The files of ``record`` whose content ``earlier`` does not have."""
    known = {file["digest"] for file in earlier["files"]}
    return [file["stat"][0] for file in record["files"] if file["digest"] not in known]


def read_fingerprint(path: Path) -> dict[str, Any]:
    """Empty if ``path`` does not exist; DataError if it is damaged."""
    if not path.is_file():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        _content(record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} cannot be read. Remove the folder {path.parent} to tokenize again.") from error
    return dict(record)


def tokenizer_record(tokenizer: Tokenizer) -> dict[str, str]:
    """Hashes of the vocabulary with BOS and EOS, and of the chat template."""
    parts = {
        "vocabulary": [tokenizer.inner.get_vocab(), tokenizer.bos_id, tokenizer.eos_id],
        "template": tokenizer.chat_template,
    }
    return {
        name: hashlib.blake2b(json.dumps(part, sort_keys=True).encode(), digest_size=16).hexdigest()
        for name, part in parts.items()
    }


def known_digests(record: dict[str, Any]) -> dict[str, str]:
    """The digests of a fingerprint's files by path, size and time."""
    return {json.dumps(file["stat"]): file["digest"] for file in record.get("files", [])}


def file_record(name: str, known: Mapping[str, str]) -> dict[str, Any]:
    """Path, size, time and digest of a file; digests in ``known`` are reused."""
    if is_hub_name(name):
        return {"stat": [name], "digest": name}  # a resumed run needs no network and uses the cached data set
    if is_url(name):
        return {"stat": [name, file_bytes(name)], "digest": f"{name} {remote_version(name)}"}  # without reading it
    path = Path(name)
    stat = path.stat()
    seen = [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
    digest = known.get(json.dumps(seen))
    if digest is None:
        hashed = hashlib.blake2b(digest_size=16)
        with path.open("rb") as file:
            while block := file.read(_HASHED_BYTES):
                hashed.update(block)
        digest = hashed.hexdigest()
    return {"stat": seen, "digest": digest}


def files_below(name: str) -> list[str]:
    """The files of a folder, or the file or Hub dataset itself."""
    return sorted(str(path) for path in Path(name).rglob("*") if path.is_file()) if os.path.isdir(name) else [name]


def _files_of(source: DataSource) -> Iterator[str]:
    """The files of a source; of prepared data only the manifest, if any, which contains the other hashes."""
    for name in source.files if source.prepared else find_sources(source.files).names:
        if not source.prepared:
            yield from files_below(name)
        elif (manifest := indexed_file(name, ".json")).is_file():
            yield str(manifest)
        else:
            yield from (str(path) for path in (indexed_file(name, suffix) for suffix in SUFFIXES) if path.is_file())
