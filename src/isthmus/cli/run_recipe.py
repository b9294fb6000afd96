"""What ``isthmus sft``, ``dpo`` and ``pretrain`` do: settle the config, start the ranks if asked to, run, print."""

from __future__ import annotations

import importlib
import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from isthmus.errors import Preempted, UsageError

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG.yaml|KEY=VALUE",
        help="A config file or preset:NAME, and settings such as optim.lr=2e-5.",
        show_default=False,
    ),
]
Model = Annotated[
    str | None, typer.Option(metavar="MODEL", help="Hugging Face model folder, an id on the Hub, or preset:NAME.")
]
Data = Annotated[list[str] | None, typer.Option(metavar="FILE...", help="Training files: JSON, JSON Lines or text.")]
Out = Annotated[
    str | None, typer.Option(metavar="DIR", help="Run folder: metrics, checkpoints and the exported model.")
]
Nproc = Annotated[int, typer.Option(min=1, metavar="N", help="Ranks to start on this machine.")]
HfEvery = Annotated[int | None, typer.Option(metavar="N", help="Export to Hugging Face format every N steps too.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the complete config and stop.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error, and what every rank prints.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the command line says."""

    words: list[str] | None
    model: str | None
    data: list[str] | None
    out: str | None
    nproc: int
    hf_every: int | None
    dry_run: bool
    debug: bool
    json: bool


def train(recipe: str, request: Request) -> int:
    """Carry out a training command.

    Returns:
        The exit code.

    Raises:
        IsthmusError: as the config and the recipe do.
    """
    from isthmus.cli import process_state
    from isthmus.cli.cli_args import config_and_overrides
    from isthmus.cli.exit import Ending, keep_traceback, say
    from isthmus.config.load import dump, load_config
    from isthmus.launch.rank_env import join_world, rank

    file, overrides = config_and_overrides(request.words or [])
    flags = {
        "model": request.model,
        "data": request.data or None,
        "out": request.out,
        "hf_every": request.hf_every,
    }
    config = load_config(recipe, file, overrides, flags)
    process_state.run_folder = Path(config.out)
    joined = join_world()
    if request.dry_run:
        if rank() == 0:
            text = json.dumps(config.model_dump(mode="json"), indent=2) if request.json else dump(config)
            print(text.rstrip("\n"), flush=True)
        return 0
    if not joined and request.nproc > 1:
        from isthmus.launch.local_launcher import launch

        end = launch(process_state.argv, request.nproc, debug=request.debug)
        ending = keep_traceback(Ending(end.exit_code, end.message, end.traceback), process_state.run_folder)
        say(ending, debug=request.debug)
        return ending.exit_code
    if joined and not process_state.started_by_isthmus and request.nproc > 1:
        raise UsageError(
            f"--nproc {request.nproc} starts ranks, but this process already is one (rank {rank()}). Leave --nproc out."
        )
    if not process_state.started_by_isthmus:
        # Until the recipe listens for it, which takes some imports.
        signal.signal(signal.SIGTERM, _stopped_early)
    result = importlib.import_module(f"isthmus.recipes.{recipe}").run(config)
    if rank() == 0:
        show(result, as_json=request.json)
    return 0


def _stopped_early(number: int, frame: FrameType | None) -> NoReturn:
    raise Preempted("stopped before training began, as asked.")


def show(result: Any, *, as_json: bool) -> None:
    """Print a recipe's result to stdout, the items of a list below each other."""
    values: dict[str, Any] = result.as_dict()
    if as_json:
        print(json.dumps(values), flush=True)
        return
    width = max(map(len, values), default=0)
    for name, value in values.items():
        if value is None or value == []:
            continue
        label = name.replace("_", " ")
        for item in value if isinstance(value, list) else [value]:
            text = f"{item:,.6g}" if isinstance(item, float) else str(item)
            sys.stdout.write(f"{label:<{width}}  {text}\n")
            label = ""
    sys.stdout.flush()
