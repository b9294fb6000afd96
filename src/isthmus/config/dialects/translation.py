"""A run of another program as Isthmus settings, with remarks on options without an equal setting, and as a config."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from isthmus.config.recipes import RecipeName
from isthmus.config.yaml_text import write_mapping

Status: TypeAlias = Literal["different", "ignored", "unsupported", "mistake"]
"""``ignored``: the training is the same without it.
``mistake``: the option probably does not have the effect that its author expects."""


@dataclass(frozen=True, slots=True)
class OptionRemark:
    option: str
    """As in the other program: ``GEMM_TUNING=1``, ``--use-flash-attn``."""
    status: Status
    reason: str


@dataclass(frozen=True, slots=True)
class World:
    nnodes: int = 1
    node_rank: int = 0
    nproc_per_node: int | None = None
    """None: one rank per GPU."""
    master_addr: str | None = None
    master_port: int | None = None


@dataclass(slots=True)
class Translation:
    """The content of a config file, not validated yet."""

    recipe: RecipeName
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings by dotted name (``parallel.tp``), in the types of the schema."""
    origins: dict[str, str] = field(default_factory=dict)
    """The option of each setting, by dotted name."""
    remarks: list[OptionRemark] = field(default_factory=list)
    world: World = World()

    def put(self, name: str, value: Any, origin: str) -> None:
        """A later call wins."""
        self.settings[name], self.origins[name] = value, origin

    def remark(self, option: str, status: Status, reason: str) -> None:
        self.remarks.append(OptionRemark(option, status, reason))


def grouped(remarks: Iterable[OptionRemark]) -> list[OptionRemark]:
    """One remark for all options with the same status and reason."""
    options: dict[tuple[Status, str], list[str]] = {}
    for remark in remarks:
        options.setdefault((remark.status, remark.reason), []).append(remark.option)
    return [OptionRemark(", ".join(names), status, reason) for (status, reason), names in options.items()]


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``{"train.steps": 5}`` -> ``{"train": {"steps": 5}}``"""
    values: dict[str, Any] = {}
    for name, value in settings.items():
        *sections, last = name.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return values


def as_yaml(translation: Translation, title: str) -> str:
    """``title`` (one or more lines) is the first comment."""
    lines = [f"# {line}".rstrip() for line in title.splitlines()]
    if translation.remarks:
        lines += ["#", "# Options without an equal setting:"]
        lines += [f"# - {remark_line(remark)}" for remark in translation.remarks]
    lines += [f"recipe: {translation.recipe}", *_section(nested(translation.settings), (), translation.origins)]
    return "\n".join(lines) + "\n"


def remark_line(remark: OptionRemark) -> str:
    return f"{remark.option} ({remark.status}): {remark.reason}"


def as_json(translation: Translation) -> dict[str, Any]:
    return {
        "config": {"recipe": translation.recipe, **nested(translation.settings)},
        "origins": dict(translation.origins),
        "remarks": [asdict(remark) for remark in translation.remarks],
        "world": asdict(translation.world),
    }


def _section(values: Mapping[str, Any], prefix: tuple[str, ...], origins: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * len(prefix)
    for name, value in values.items():
        key = (*prefix, name)
        if isinstance(value, dict) and value and ".".join(key) not in origins:
            yield f"{indent}{name}:"
            yield from _section(value, key, origins)
            continue
        first, *rest = write_mapping({name: value}).rstrip("\n").splitlines()
        origin = origins.get(".".join(key))
        if origin is not None and rest and not first.endswith(":"):  # a text over several lines
            yield f"{indent}# {origin}"
        elif origin is not None:
            first = f"{first}  # {origin}"
        yield from (f"{indent}{line}" for line in (first, *rest))
