"""The command of a Megatron-LM training run: Python file, arguments and ranks."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isthmus.config.dialects.translation import World
from isthmus.errors import UsageError

_WORLD = {
    "nproc_per_node": "nproc_per_node",
    "num_gpus": "nproc_per_node",
    "nnodes": "nnodes",
    "num_nodes": "nnodes",
    "nodes": "nnodes",  # of srun
    "ntasks_per_node": "nproc_per_node",
    "node_rank": "node_rank",
    "master_addr": "master_addr",
    "master_port": "master_port",
}


@dataclass(frozen=True, slots=True)
class TrainingCommand:
    script: str
    """The Python file; empty if only arguments are given."""
    flags: tuple[str, ...]
    world: World
    environment: Mapping[str, str] = field(default_factory=dict)
    not_run: tuple[str, ...] = ()
    """Other commands of the script that may train, but have none of Megatron-LM's training arguments."""


def read_command(words: Sequence[str]) -> TrainingCommand:
    """Without a Python file, all words are arguments."""
    place = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
    if place is None:
        return TrainingCommand("", tuple(words), World())
    if words[place].endswith("checkpoint/convert.py"):
        raise UsageError(
            f"{words[place]} converts a checkpoint and trains nothing. isthmus convert takes its options: "
            f"isthmus convert {shlex.join(words[place + 1 :])}"
        )
    return TrainingCommand(words[place], tuple(words[place + 1 :]), _world(words[:place]))


def _world(words: Sequence[str]) -> World:
    """The ranks, from the launcher's options before the Python file."""
    fields: dict[str, Any] = {}
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        flag = "--nodes" if flag == "-N" else flag
        if (name := _WORLD.get(flag.lstrip("-").replace("-", "_"))) is None or not flag.startswith("-"):
            continue
        value = value if equals else words[place + 1] if place + 1 < len(words) else ""
        if name == "nproc_per_node" and (value in ("", "0") or value.startswith("-")):
            continue  # the script counted the GPUs of this machine, and there are none
        if name == "master_addr":
            fields[name] = value
        elif value.isdigit():
            fields[name] = int(value)
        elif name != "nproc_per_node" or value not in ("gpu", "auto", "cpu"):
            raise UsageError(f"{flag} must be a whole number, got {value!r}.")
    return World(**fields)
