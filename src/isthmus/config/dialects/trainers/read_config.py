"""Reads a trainer's config: YAML, JSON, or a shell script that starts one training."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isthmus.config.dialects.scripts.record_script import SHELL_SUFFIXES, ScriptKind, record_script, without_comments
from isthmus.config.dialects.scripts.stand_in import verl_program
from isthmus.config.yaml_text import TEXT_BYTES, Syntax, read_mapping, read_value
from isthmus.errors import UsageError
from isthmus.files.input_files import read_text

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")
_EXPR = re.compile(r"(?<=\s)\$\(\s*expr\s+(\S+)\s+([-+*/])\s+(\S+)\s*\)|(?<=\s)\$\(\(([^()]*)\)\)")
_PROGRAMS = re.compile(r"(?:.*/)?(swift|megatron|trl|llamafactory-cli|lmf|axolotl|\w+\.py)")
_VERL_SCRIPT = ScriptKind(
    is_training=lambda words: bool(_hydra_words(words)),
    command="python -m verl.trainer.main_ppo",
    mark="overrides such as data.train_batch_size=512",
    advice="Give the config that Hydra wrote of a run: outputs/DATE/TIME/.hydra/config.yaml.",
)
_RANKS = ("NPROC_PER_NODE", "--nproc_per_node", "--nproc-per-node", "--num_processes")


@dataclass(frozen=True, slots=True)
class TrainerFile:
    values: Mapping[str, Any]
    verb: str | None = None
    """``sft`` of ``swift sft ...``; None for a config file."""
    program: str | None = None
    """``swift`` of ``swift sft ...``."""
    nproc: int | None = None
    """Ranks that the script starts."""
    variables: Mapping[str, str] = field(default_factory=dict)
    not_run: tuple[str, ...] = ()
    """Commands of a script that may change the training."""


def read_trainer_file(path: Path, program: str) -> TrainerFile:
    """Read a config or the training command of a script.

    A script of verl, which makes its options of arrays and branches, runs as :func:`record_script` restricts it. Those
    of other programs are read.

    Raises:
        MissingInput: there is no such file.
        UsageError: it is neither a mapping nor a script with one training command.
        UnsafeInput: a script of verl exceeds a limit, or reads a file or a variable that it does not get.
    """
    text = read_text(path, TEXT_BYTES)
    if path.suffix in SHELL_SUFFIXES or text.startswith("#!"):
        return _verl_script(path) if program == "verl" else _script(path, text)
    try:
        if path.suffix == ".json":
            values = json.loads(text)
            if not isinstance(values, dict):
                raise UsageError(f"{path} is not a config: it must be an object of settings.")
            return TrainerFile(values)
        return TrainerFile(read_mapping(text)[0])
    except Syntax as error:
        place = f":{error.line}:{error.column}" if error.line else ""
        raise UsageError(f"{path}{place}  {error.reason}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}.") from error


def _script(path: Path, text: str) -> TrainerFile:
    """The last training command; variables that the script sets itself are filled in, nothing is run."""
    variables: dict[str, str] = {}
    result: TrainerFile | None = None
    for line in _lines(without_comments(text)):
        filled = _EXPR.sub(_calculated, _fill(line, variables))
        try:
            words = shlex.split(filled)
        except ValueError as error:
            raise UsageError(f"{path} is not a script that can be read: {error}.") from error
        while words and (match := _ASSIGNMENT.fullmatch(words[0])):
            variables[match[1]] = match[2]
            words = words[1:]
        result = _command(words, variables) or result
    if result is None:
        raise UsageError(f"{path} starts no training with options: no command such as `swift sft --model ...`.")
    return result


def _lines(text: str) -> list[str]:
    """Lines, of which one with an open quote continues on the next."""
    lines: list[str] = []
    for line in text.splitlines():
        if lines and lines[-1].count("'") % 2 == 1:
            lines[-1] += f"\n{line}"
        else:
            lines.append(line)
    return lines


def _fill(line: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return variables.get(name, match[2] or match[0])

    return _VARIABLE.sub(value, line)


def _calculated(match: re.Match[str]) -> str:
    """``$(expr 16 / 2)`` and ``$((16 / 2))`` of whole numbers."""
    words = [match[1], match[2], match[3]] if match[1] else (match[4] or "").split()
    if len(words) != 3 or not (words[0].isdigit() and words[2].isdigit()):
        return match[0]
    left, right = int(words[0]), int(words[2])
    results = {"+": left + right, "-": left - right, "*": left * right, "/": left // right if right else 0}
    return str(results.get(words[1], match[0]))


def _command(words: Sequence[str], variables: Mapping[str, str]) -> TrainerFile | None:
    place = next((place for place, word in enumerate(words) if _PROGRAMS.fullmatch(word)), None)
    if place is None or not any(word.startswith("--") for word in words[place:]):
        return None
    match = _PROGRAMS.fullmatch(words[place])
    assert match is not None
    program, rest = match[1], list(words[place + 1 :])
    verb = Path(program).stem if program.endswith(".py") else None
    if rest and not rest[0].startswith("-"):
        verb, rest = rest[0], rest[1:]
    return TrainerFile(_options(rest), verb, program, _ranks(words[:place], variables), dict(variables))


def _ranks(words: Sequence[str], variables: Mapping[str, str]) -> int | None:
    if (count := variables.get("NPROC_PER_NODE", "")).isdigit():
        return int(count)
    for place, word in enumerate(words):
        flag, _, value = word.partition("=")
        value = value or (words[place + 1] if place + 1 < len(words) else "")
        if flag in _RANKS and value.isdigit():
            return int(value)
    return None


def _verl_script(path: Path) -> TrainerFile:
    command = record_script(path, (), _VERL_SCRIPT, restricted=True)
    values = _overrides(_hydra_words(command.words))
    return TrainerFile(values, program="verl", variables=command.environment, not_run=command.not_run)


def _hydra_words(words: Sequence[str]) -> Sequence[str]:
    """The arguments of a training of verl; none in another command."""
    place = verl_program(words)
    arguments = () if place is None else words[place + 1 :]
    return arguments if any("=" in word for word in arguments) else ()


def _overrides(words: Sequence[str]) -> dict[str, Any]:
    """``name=value``, ``+name=value`` and ``++name=value`` of Hydra."""
    values: dict[str, Any] = {}
    for before, word in zip(("", *words), words, strict=False):
        name, equals, value = word.lstrip("+-").replace("config-", "config_", 1).partition("=")
        if before in ("--config-name", "--config-path"):
            name, equals, value = before[2:].replace("-", "_"), "=", word
        elif word.startswith("-") and not equals:
            continue
        if not equals:
            raise UsageError(f"{word} is not an override of Hydra (name=value). {_VERL_SCRIPT.advice}")
        try:
            values[name] = read_value(value)
        except Syntax:
            values[name] = value
    return values


def _options(words: Sequence[str]) -> dict[str, Any]:
    """``--name value``, ``--name a b`` (a list), ``--name=value``, and ``--name`` (true)."""
    values: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            values[name] = value if equals else True
        elif word in ("|", "&", "&&", ";", ">", "2>&1"):
            break
        elif name:
            before = values[name]
            values[name] = word if before is True else [*(before if isinstance(before, list) else [before]), word]
    return values
