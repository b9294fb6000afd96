"""A translation as the text of a config file, and as values for other programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from isthmus.config.dialects.translation import Remark, Translation, World
from isthmus.config.yaml_text import write_mapping

_WORDS = {"otherwise": "done otherwise", "not at all": "not done", "mistaken": "likely a mistake"}
_WIDTH = 110
_TREE = ("model.config",)
"""Settings that are mappings themselves, one origin speaking for all of them."""


def nested(translation: Translation) -> dict[str, Any]:
    """The settings as a config file has them: ``recipe``, then section by section, each in the order it was put."""
    values: dict[str, Any] = {"recipe": translation.recipe}
    for name, value in translation.settings.items():
        *sections, last = name.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return values


def write_translation(translation: Translation, name: str = "run.yaml") -> str:
    """A config file with all that there is to know as comments: what is done otherwise, how to start it, origins.

    Args:
        translation: what another program was told.
        name: what the file will be called, for the command that starts it.
    """
    lines = [f"# {line}".rstrip() for line in _opening(translation, name)]
    lines += _lines(nested(translation), (), translation.origins)
    return "\n".join(lines) + "\n"


def values_of(translation: Translation, name: str = "run.yaml") -> dict[str, Any]:
    """All of it, for ``--json``: the config, the origin of each setting, remarks, ranks, and the command."""
    return {
        "config": nested(translation),
        "origins": dict(translation.origins),
        "remarks": [asdict(remark) for remark in translation.remarks],
        "world": asdict(translation.world),
        "command": start_command(translation.recipe, translation.world, name),
    }


def start_command(recipe: str, world: World, name: str = "run.yaml") -> str:
    """The command that starts a run of this config over these ranks."""
    ranks = "" if world.nproc_per_node is None else str(world.nproc_per_node)
    if world.nnodes == 1:
        return f"isthmus {recipe} {name}" + (f" --nproc {ranks}" if ranks not in ("", "1") else "")
    at = f" --master-addr {world.master_addr}" if world.master_addr else ""
    at += f" --master-port {world.master_port}" if world.master_port else ""
    return (
        f"torchrun --nnodes {world.nnodes} --node-rank {world.node_rank} --nproc-per-node {ranks or 'gpu'}{at} "
        f"-m isthmus {recipe} {name}"
    )


def _opening(translation: Translation, name: str) -> Iterator[str]:
    yield "Start it with"
    yield ""
    yield f"  {start_command(translation.recipe, translation.world, name)}"
    yield ""
    if translation.remarks:
        yield "What was said and is no setting here:"
        yield ""
        for remark in translation.remarks:
            yield from _said(remark)
        yield ""


def _said(remark: Remark) -> Iterator[str]:
    line = "-"
    for word in f"{remark.said}: {_WORDS[remark.became]}. {remark.why}".split():
        if len(line) + 1 + len(word) > _WIDTH and line.strip() != "-":
            yield line
            line = " "
        line += f" {word}"
    yield line


def _lines(values: Mapping[str, Any], prefix: tuple[str, ...], origins: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * len(prefix)
    for key, value in values.items():
        path = (*prefix, key)
        dotted = ".".join(path)
        comment = f"  # {' '.join(origins[dotted].split())}" if dotted in origins else ""
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:{comment}"
            yield from _lines(value, path, {} if dotted in _TREE else origins)
            continue
        first, *rest = write_mapping({key: value}).rstrip("\n").split("\n")
        # A comment within text of several lines would end it.
        yield indent + first + (comment if not rest or first.endswith(":") else "")
        yield from (indent + line for line in rest)
