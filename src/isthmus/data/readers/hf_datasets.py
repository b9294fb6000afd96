"""Hugging Face datasets: a folder written by ``save_to_disk``, or a dataset on the Hub.

``hf:org/name``, ``hf:org/name:split``, or ``hf:org/name/configuration:split``; the default split is ``train``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isthmus.data.readers.arrow_reader import ArrowChunk, row_chunks, rows_at_once
from isthmus.errors import DataError, IOFailure, MissingInput, UsageError

HUB = "hf:"
METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files of a dataset without records."""


def is_dataset(folder: Path) -> bool:
    """Whether ``save_to_disk`` wrote this folder, with one or several splits."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def check_name(name: str) -> None:
    path, configuration, split = _parts(name)
    if not all(path.split("/")) or configuration == "" or split == "":
        raise UsageError(
            f"{name}: not the name of a data set. Expected hf:ORG/NAME, hf:ORG/NAME:SPLIT or hf:ORG/NAME/CONFIG:SPLIT."
        )


def dataset_chunks(name: str) -> Iterator[ArrowChunk]:
    """The rows of a dataset; a Hub dataset is downloaded into the cache of ``datasets``."""
    library = _library(name)
    found = _from_hub(library, name) if name.startswith(HUB) else _from_disk(library, name)
    size = rows_at_once(len(found), found.data.nbytes)
    yield from row_chunks(name, found.with_format("arrow").iter(batch_size=size))


def _from_disk(library: Any, name: str) -> Any:
    try:
        found = library.load_from_disk(name)
    except Exception as error:  # of Arrow, JSON or datasets
        raise DataError(
            f"{name}: damaged or incomplete data set: {_one_line(error)} Write it again with save_to_disk."
        ) from error
    if isinstance(found, dict):
        splits = list(found)
        if "train" not in found and len(splits) > 1:
            raise UsageError(f"{name}: has the splits {', '.join(splits)}. Name the folder of one of them.")
        return found["train" if "train" in found else splits[0]]
    return found


def _from_hub(library: Any, name: str) -> Any:
    path, configuration, split = _parts(name)
    try:
        return library.load_dataset(path, configuration, split=split or "train")
    except library.exceptions.DatasetNotFoundError as error:
        raise MissingInput(
            f"{name}: no such data set on the Hugging Face Hub, or it is private or gated: {_one_line(error)} "
            "Check the name; for a gated one request access on its page, then log in: hf auth login, or HF_TOKEN."
        ) from error
    except ValueError as error:  # an unknown split, or a choice of configurations
        raise UsageError(f"{name}: {_one_line(error)}") from error
    except Exception as error:  # of datasets or its HTTP library, which differs by version
        raise IOFailure(
            f"{name}: cannot be downloaded from the Hugging Face Hub: {_one_line(error)} "
            "Without a network, download it elsewhere, save it with save_to_disk and name the folder."
        ) from error


def _parts(name: str) -> tuple[str, str | None, str | None]:
    """Repository, configuration and split."""
    path, colon, split = name.removeprefix(HUB).partition(":")
    owner, *rest = path.split("/", 2)
    return "/".join([owner, *rest[:1]]), rest[1] if len(rest) > 1 else None, split if colon else None


def _library(name: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UsageError(f"{name}: reading it needs datasets: pip install 'isthmus[data]'.") from error
    datasets.disable_progress_bars()
    return datasets


def _one_line(error: Exception) -> str:
    line = " ".join(str(error).split()) or type(error).__name__
    return line if line.endswith((".", "!", "?")) else f"{line}."
