"""Data arguments: blends, splits and the sequence length."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from typing import Any

from isthmus.config.dialects.megatron.arguments import Arguments, WrittenArguments
from isthmus.config.dialects.translation import Translation
from isthmus.config.schema.data import DOCUMENT_SETTINGS

_SPLIT = "969, 30, 1"
_EVAL_ITERS = 100  # Megatron-LM's default
_DOCUMENTS = tuple(f"data.{name}" for name in DOCUMENT_SETTINGS)


def put_data(args: Arguments, translation: Translation) -> None:
    translation.put("data.seq_length", args.get("seq_length") or 2048, args.source("seq_length"))
    args.put(translation, "data.seed")
    if args.get("mock_data"):
        args.put(translation, "data.mock")
        for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
            if args.get(name):
                translation.remark(args.source(name), "mistake", "With --mock-data these files are not read.")
        _put_split(args, translation)
    elif args.get("data_path"):
        _put_blend(args, translation, "data_path")
        _put_split(args, translation)
    elif args.get("train_data_path"):
        _put_blend(args, translation, "train_data_path")
        translation.put("data.valid_fraction", 0.0, args.source("train_data_path"))
        for part in ("valid", "test"):
            name = f"{part}_data_path"
            if not args.get(name):
                continue
            weighted = weighted_paths(args.get(name))
            translation.put(f"data.{part}_files", [path for _, path in weighted], args.source(name))
            if len({weight for weight, _ in weighted}) > 1:
                translation.remark(
                    args.source(name), "different", "Validation and test files are used whole, without weights."
                )
            if part == "valid":
                translation.settings.pop("data.valid_fraction")
                translation.origins.pop("data.valid_fraction")
    if translation.recipe == "pretrain" and not args.get("mock_data"):
        args.put(translation, *_DOCUMENTS)
    if args.get("train_data_path") and args.has("split") and not args.get("mock_data"):
        translation.remark(args.source("split"), "mistake", "It splits --data-path; these files are separate already.")


def _put_blend(args: Arguments, translation: Translation, name: str) -> None:
    weighted, source = weighted_paths(args.get(name)), args.source(name)
    if len(weighted) == 1 or weighted[0][0] is None:
        translation.put("data.files", [path for _, path in weighted], source)
        return
    sets: dict[str, Any] = {}
    for weight, path in weighted:
        stem = posixpath.basename(path.rstrip("/")).removesuffix("_text_document") or "set"
        stem = stem.replace(".", "-")
        unique, number = stem, 2
        while unique in sets:
            unique, number = f"{stem}-{number}", number + 1
        sets[unique] = {"files": [path], "weight": weight}
    translation.put("data.sets", sets, source)


def write_data(written: WrittenArguments) -> None:
    data = written.config.data
    written.put("data.mock", "data.seq_length")
    if written.config.recipe == "pretrain" and not data.mock:
        written.put(*_DOCUMENTS)
    weighted = [
        word
        for dataset in data.sets.values()
        for path in dataset.files
        for word in (str(dataset.weight / len(dataset.files)), path)
    ]
    if any(len(dataset.files) > 1 for dataset in data.sets.values()):
        why = "The files of a set get equal shares of its weight; in Isthmus their sizes decide."
        written.remark("data.sets", "different", why)
    separate = bool(data.valid_files or data.test_files)
    paths = weighted or list(data.files)
    written.set("train_data_path" if separate else "data_path", paths or None, "data.files", "data.sets")
    for part in ("valid", "test"):
        files = list(getattr(data, f"{part}_files"))
        written.set(f"{part}_data_path", files or None, f"data.{part}_files")
    shares = (1 - data.valid_fraction - data.test_fraction, data.valid_fraction, data.test_fraction)
    if not separate:
        split = ",".join(f"{share:.9f}".rstrip("0").rstrip(".") for share in shares)
        written.set("split", split, "data.valid_fraction", "data.test_fraction")
    elif data.valid_files:
        written.set("split", None, "data.valid_fraction")  # not used
    if data.valid_files if separate else any(shares[1:]):
        setting = "data.valid_files" if separate else "data.valid_fraction"
        written.set("eval_iters", _EVAL_ITERS, also_default=True)
        why = "Megatron-LM evaluates --eval-iters global batches; Isthmus evaluates the whole validation set."
        written.remark(setting, "different", why)
    else:
        written.set("eval_iters", 0)


def weighted_paths(words: Sequence[Any]) -> list[tuple[float | None, str]]:
    """(weight, path) pairs, from alternating weights and paths, or from paths alone, which have sizes as weights."""
    texts = [str(word) for word in words]
    # Primus gives one string with all of them.
    texts = texts[0].split() if len(texts) == 1 else texts
    if len(texts) % 2 == 0 and all(_is_number(text) for text in texts[::2]):
        return [(float(weight), path) for weight, path in zip(texts[::2], texts[1::2], strict=True)]
    return [(None, text) for text in texts]


def _is_number(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def _put_split(args: Arguments, translation: Translation) -> None:
    split = str(args.get("split") or _SPLIT)
    source = args.source("split")
    parts = [float(part) for part in re.findall(r"[0-9]*\.?[0-9]+", split)]
    if not parts or len(parts) > 3 or not sum(parts):
        args.errors.append(f"{source}  must be up to three numbers such as 969,30,1")
        return
    parts += [0.0] * (3 - len(parts))
    # Without evaluation iterations the validation split is never read.
    unseen = args.has("eval_iters") and args.get("eval_iters") <= 0
    if unseen:
        source = args.source("eval_iters")
    for name, part in (("valid", parts[1]), ("test", parts[2])):
        share = 0.0 if unseen else round(part / sum(parts), 9)
        if share or name == "valid":
            translation.put(f"data.{name}_fraction", share, source)
