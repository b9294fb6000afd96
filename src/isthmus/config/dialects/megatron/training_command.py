"""The command of a Megatron-LM training run: Python file, arguments and ranks."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from isthmus.config.dialects.scripts.record_script import ScriptKind, record_script
from isthmus.config.dialects.scripts.stand_in import has_training_flag
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


_SCRIPT = ScriptKind(
    is_training=has_training_flag,
    command="python or torchrun with a pretrain_*.py",
    mark="--num-layers",
    advice="With --run {script} bash runs it without restrictions; or give Megatron-LM's arguments after --.",
)


@dataclass(frozen=True, slots=True)
class TrainingCommand:
    script: str
    """The Python file; empty if only arguments are given."""
    flags: tuple[str, ...]
    world: World
    environment: Mapping[str, str] = field(default_factory=dict)
    not_run: tuple[str, ...] = ()
    """Other commands of the script that may train, but have none of Megatron-LM's training arguments."""


def script_command(
    script: Path, arguments: Sequence[str] = (), *, restricted: bool = False, time_limit_s: float | None = None
) -> TrainingCommand:
    """The training that a script starts, see :func:`record_script`."""
    recorded = record_script(script, arguments, _SCRIPT, restricted=restricted, time_limit_s=time_limit_s)
    return replace(read_command(recorded.words), environment=recorded.environment, not_run=recorded.not_run)


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
