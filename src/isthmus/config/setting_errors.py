"""Error messages about settings, with a suggestion for unknown names."""

from __future__ import annotations

import contextlib
import difflib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel

from isthmus.config.schema import RunConfig
from isthmus.config.yaml_text import Key, Syntax, read_value

GIVEN_BY: Mapping[str, Key] = {
    "--model": ("model", "path"),
    "--data": ("data", "files"),
    "--out": ("out",),
    "--hf-every": ("checkpoint", "hf_every"),
    "--push": ("checkpoint", "push"),
    "--public": ("checkpoint", "push_public"),
    "--accept-changes": ("checkpoint", "accept_changes"),
    "--trust": ("checkpoint", "skip_checksums"),
}
"""Command-line options and the settings that they set."""

_NO = "no, "
_OTHER_NAMES = {
    "batch_size": "train.global_batch_size",
    "tensorboard": "logging.to",
    "sft_loss_weight": "dpo.sft_weight",
    "sft_average_log_probs": "dpo.sft_weight, whose loss is the mean over tokens",
    "preference_loss_weight": "dpo.sft_weight, relative to a preference loss of weight 1",
    "preference_average_log_probs": "dpo.length_normalized",
    "reference_policy_kl_penalty": "dpo.beta",
    "gpus_per_node": "--nproc",
}
"""Names in other programs, besides the table of trainers: earlier settings of ours, and NeMo-RL's."""


@functools.cache
def other_names() -> Mapping[str, str]:
    """The answer to each name of a setting in other programs: ours, or "no" and a reason; an explanation may follow."""
    return {name: answer for table in trainers().values() for name, answer in table.items()} | _OTHER_NAMES


@functools.cache
def trainers() -> Mapping[str, Mapping[str, str]]:
    """Names and answers by program; ``common`` are those that most of them have. Reversed, so that it wins."""
    path = Path(__file__).parent / "dialects" / "trainers" / "answers.yaml"
    tables: dict[str, dict[str, str]] = read_value(path.read_text(encoding="utf-8"))
    return dict(reversed(tables.items()))


def dotted(key: Key) -> str:
    return ".".join(key)


def reason(error: Mapping[str, Any], key: Key) -> str:
    kind, value = error["type"], error["input"]
    if kind == "clash":
        return str(error["ctx"]["reason"])
    if kind == "extra_forbidden":
        *sections, last = [part for name in key for part in name.split(".")]
        if len(sections) >= len(key) and (*sections, last) in settings():
            return f"is not a key; in a file write `{': {'.join((*sections, last))}: ...{'}' * len(sections)}`"
        guess = _suggestion(key)
        if guess is None and isinstance(value, dict):  # a section of another program
            guess = next(filter(None, map(other_names().get, value)), None)
        if guess is not None and guess.startswith(_NO):
            return f"is not a setting: {guess.removeprefix(_NO)}"
        return "is not a setting" + (f" (did you mean {guess}?)" if guess else "")
    if kind in ("missing", "lacks"):
        option = next((option for option, stands_for in GIVEN_BY.items() if stands_for == key), None)
        ways = f"{option} or {dotted(key)}=..." if option else f"{dotted(key)}=..."
        return f"is missing: {_describe(key)} Give it with {ways}"
    if kind == "model_type":
        return f"is a section, with settings such as {dotted(key)}.{_some_setting(key)}; got {_show(value)}"
    if kind == "tuple_type":
        return f"must be a list, got {_show(value)}"
    if kind == "too_short":
        return "must not be empty"
    text = str(error["msg"]).replace("Input should be", "must be").replace("a valid string", "text")
    return f"{text.replace('String should have', 'must have')}, got {_show(value)}{_hint(kind, value)}"


def settings() -> Iterator[Key]:
    for name, section in RunConfig.model_fields.items():
        fields = _fields(section.annotation)
        yield from ((name, field) for field in fields) if fields else [(name,)]


def _fields(section: Any) -> dict[str, Any]:
    # In Python 3.10 tuple[str, ...] is an instance of type, too.
    is_section = get_origin(section) is None and isinstance(section, type) and issubclass(section, BaseModel)
    return dict(section.model_fields) if is_section else {}


def _suggestion(key: Key) -> str | None:
    """The most similar setting: in the same section, then by its last part in any section."""
    last = key[-1].replace("-", "_").lower()
    if last in other_names():
        return other_names()[last]
    known_keys = list(settings())
    near = difflib.get_close_matches(last, [known[-1] for known in known_keys if known[:-1] == key[:-1]], n=1)
    if near:
        return dotted((*key[:-1], near[0]))
    full_matches = difflib.get_close_matches(dotted((*key[:-1], last)), map(dotted, known_keys), n=1, cutoff=0.8)
    if full_matches:
        return full_matches[0]
    owners = [dotted(known) for known in known_keys if known[-1] == last]
    if owners:
        return " or ".join(owners)
    sections = [name for name, field in RunConfig.model_fields.items() if _fields(field.annotation)]
    return next(iter(difflib.get_close_matches(key[0], sections, n=1)), None) if key[0] not in sections else None


def _describe(key: Key) -> str:
    fields: dict[str, Any] = dict(RunConfig.model_fields)
    for part in key[:-1]:
        fields = _fields(fields[part].annotation)
    return str(fields[key[-1]].description).strip()


def _some_setting(key: Key) -> str:
    return next(iter(_fields(RunConfig.model_fields[key[0]].annotation)))


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _hint(kind: str, value: Any) -> str:
    """Hint for text instead of a number or a boolean; YAML 1.1 booleans are text in 1.2."""
    if not isinstance(value, str):
        return ""
    if kind == "bool_type":
        return "; write true or false"
    if kind in ("int_type", "float_type"):
        with contextlib.suppress(Syntax):
            return "; leave out the quotes" if isinstance(read_value(value), int | float) else ""
    return ""
