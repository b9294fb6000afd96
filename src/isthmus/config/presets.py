"""Shipped run configs and models, by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from isthmus.errors import UsageError

PREFIX = "preset:"
"""Prefix of a preset's name where a file is allowed too."""
PRESETS_PAGE = "docs/reference/presets.md"
Kind = Literal["train", "models", "bench"]
"""A run config, a model with the keys of its ``config.json``, or a table of configs for ``isthmus bench``."""
_FOLDER = Path(__file__).resolve().parents[1] / "presets"
_WORDS: dict[Kind, tuple[str, str]] = {
    "train": ("a run config", "Use it in place of a config file, or with `isthmus config cp`."),
    "models": ("a model", "Use it with --model or as model.path."),
    "bench": ("a table of run configs", "Use it with `isthmus bench`."),
}


def nearest(name: str, names: Iterable[str], prefix: str = "") -> str:
    """``Did you mean a, b or c?``: the three names most similar to ``name``."""
    near = [prefix + match for match in difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.0)]
    return f"Did you mean {', '.join(near[:-1])} or {near[-1]}?" if len(near) > 1 else f"Did you mean {near[0]}?"


def preset_names(kind: Kind = "train") -> list[str]:
    """Sorted; no name is of two kinds."""
    return sorted(path.stem for path in (_FOLDER / kind).glob("*.yaml"))


def config_path(source: str, kind: Kind = "train") -> Path:
    """The file of a path or of ``preset:NAME``."""
    if not source.startswith(PREFIX):
        return Path(source)
    if (reason := not_a_preset(source, kind)) is not None:
        raise UsageError(reason)
    return _FOLDER / kind / f"{source.removeprefix(PREFIX)}.yaml"


def not_a_preset(source: str, kind: Kind) -> str | None:
    """Why ``preset:NAME`` is no preset of this kind, with the three most similar names; None if it is one."""
    name = source.removeprefix(PREFIX)
    if name in preset_names(kind):
        return None
    if (other := kind_of(name)) != kind and name in preset_names(other):
        what, hint = _WORDS[other]
        return f"{source} is {what}, expected {_WORDS[kind][0]}. {hint}"
    names = preset_names(kind) if kind != "train" else [preset for group in _WORDS for preset in preset_names(group)]
    guess = nearest(name, names, PREFIX)
    return f"there is no preset {name!r}. {guess} `isthmus config ls WORDS` searches them, see {PRESETS_PAGE}."


def preset_of(path: Path) -> str | None:
    """``preset:NAME`` of a file of this package, else None."""
    return f"{PREFIX}{path.stem}" if path.parent.parent == _FOLDER else None


def preset_of_id(repo_id: str) -> str | None:
    """``preset:NAME`` of the model with this id on the Hub, else None."""
    for name in preset_names("models"):
        opening = " ".join(opening_lines(config_path(f"{PREFIX}{name}", "models")))
        if repo_id in (word.strip(".,") for word in opening.split()):
            return f"{PREFIX}{name}"
    return None


def matches(words: Sequence[str], name: str, description: str) -> bool:
    """Whether each word is in the name or in the description of a preset, in any case."""
    text = f"{PREFIX}{name} {description}".lower()
    return all(word.lower() in text for word in words)


def is_model_file(source: str) -> bool:
    """Whether ``model.path`` is a YAML file or a preset, which have no weights."""
    return source.startswith(PREFIX) or source.lower().endswith((".yaml", ".yml"))


def kind_of(source: str) -> Kind:
    """``train`` for files and unknown names."""
    return next((kind for kind in _WORDS if source.removeprefix(PREFIX) in preset_names(kind)), "train")


def about(name: str, kind: Kind = "train") -> str:
    return next(opening_lines(config_path(f"{PREFIX}{name}", kind)), "")


def opening_lines(path: Path) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            return
        yield line.removeprefix("#").strip()
