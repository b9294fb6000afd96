"""``isthmus init``: looks at data and machine and writes the config of a first run."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import typer

from isthmus.cli.options import ResultOptions, argument, is_setting, option
from isthmus.cli.terminal import note, say, show
from isthmus.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class InitOptions(ResultOptions):
    words: list[str] | None = argument(
        "[KEY=VALUE]...", "Settings for the config, such as lora.rank=8.", None, show_default=False
    )
    model: str | None = option("MODEL", "Hugging Face folder or Hub id; asked for if missing.")
    data: list[str] | None = option("FILE", "Training data, as of a run; asked for if missing.")
    recipe: str | None = option("RECIPE", "Goal: sft, dpo, ...; default: what fits the records.")
    gpus: str | None = option("NxNAME", "GPUs of the machine that will train, such as 8xMI300X; default: this machine.")
    out: Path = option("FILE", "The config to write.", Path("run.yaml"))


def init(options: InitOptions) -> int:
    """Look at the data and the machine, and write a commented config that starts at once.

    The records are read, tokenized and counted. The config has the recipe that fits them, the sequence length that
    leaves 99% of them uncut, and for GPUs the fastest layout of isthmus plan. A terminal is asked for what is missing.
    """
    if strange := [word for word in options.words or [] if not is_setting(word)]:
        raise UsageError(f"{strange[0]} is not a setting. Use KEY=VALUE; data files follow --data.")
    model = options.model or _answer("--model", "Model (Hugging Face folder or Hub id)")
    data = options.data or shlex.split(_answer("--data", "Training data (files or folders)"))
    recipe = options.recipe
    if recipe is None and options.model is None:
        recipe = typer.prompt("Goal (sft, dpo, ...; empty: what fits the data)", default="", show_default=False) or None

    from isthmus.tools.init.first_config import write_first_config
    from isthmus.tools.planner.planned_gpus import parse_machine

    config = write_first_config(
        options.out,
        model=model,
        data=data,
        recipe=recipe,
        machine=None if options.gpus is None else parse_machine(options.gpus, None, None),
        words=options.words or [],
        report=note,
    )
    if options.json:
        show(config, as_json=True)
        return 0
    say("\n".join(config.survey.lines()))
    say(f"\n{config.path} is written. Read its comments, then start:\n  {config.command}")
    return 0


def _answer(option: str, question: str) -> str:
    if not sys.stdin.isatty():
        raise UsageError(f"{option} is missing, and there is no terminal to ask on. Give {option}.")
    answer: str = typer.prompt(question)
    return answer
