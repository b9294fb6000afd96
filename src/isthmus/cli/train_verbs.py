"""``isthmus sft``, ``dpo``, ``kto``, ``reward``, ``distill``, ``grpo`` and ``pretrain``."""

from __future__ import annotations

import json as json_module
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from isthmus import __version__
from isthmus.cli.completion import complete_word
from isthmus.cli.options import Debug, Json, Public, Push, Trust, verb
from isthmus.cli.terminal import note, show
from isthmus.config.recipes import RECIPE_SETTINGS, RecipeName
from isthmus.data.readers.data_names import describe_sources
from isthmus.errors import Preempted, UsageError, counted

if TYPE_CHECKING:
    from isthmus.config.schema import RunConfig
    from isthmus.tools.planner.planned_gpus import PlannedGpus

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG.yaml|KEY=VALUE",
        help="A config file or preset:NAME, and settings such as optim.lr=2e-5.",
        show_default=False,
        autocompletion=complete_word,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Hugging Face model folder, Hub id, or preset:NAME (random weights)."),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE...",
        help=f"Training data: {describe_sources()}; or prefixes of prepared files (.bin and .idx). More: data.*",
    ),
]
Out = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Run folder: metrics, checkpoints and the exported model. Default: runs/RECIPE-MODEL-N, a new one.",
    ),
]
Nproc = Annotated[int, typer.Option(min=1, max=1024, metavar="N", help="Number of ranks to start on this machine.")]
HfEvery = Annotated[int | None, typer.Option(metavar="N", help="Also export to Hugging Face format every N steps.")]
AcceptChanges = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...", help="Resume with other values of these settings than the checkpoint's, such as lr."
    ),
]
Rehearse = Annotated[
    bool,
    typer.Option(
        "--rehearse",
        help="Train a small model of the same architecture and layout for some steps on CPUs, in OUT-rehearsal.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check all that is known without training, and print the decisions and the size of the run; with --json "
        "also the complete config.",
    ),
]
Gpus = Annotated[
    str | None,
    typer.Option(metavar="NxNAME", help="With --dry-run: check against a machine with these GPUs, such as 8xMI300X."),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    words: Words = None
    model: Model = None
    data: Data = None
    out: Out = None
    nproc: Nproc = 1
    hf_every: HfEvery = None
    push: Push = None
    public: Public = False
    accept_changes: AcceptChanges = None
    trust: Trust = False
    rehearse: Rehearse = False
    dry_run: DryRun = False
    gpus: Gpus = None
    debug: Debug = False
    json: Json = False


def flags_of(options: TrainOptions) -> dict[str, Any]:
    """The options that set something of the config, by name, as for :func:`isthmus.config.load.load_config`."""
    return {
        "model": options.model,
        "data": options.data or None,
        "out": options.out,
        "hf_every": options.hf_every,
        "push": options.push,
        "public": options.public or None,
        "accept_changes": options.accept_changes,
        "trust": options.trust or None,
    }


def train_verb(recipe: RecipeName) -> Callable[..., int]:
    def command(options: TrainOptions) -> int:
        return train(
            recipe,
            options.words or [],
            flags_of(options),
            nproc=options.nproc,
            rehearse=options.rehearse,
            dry_run=options.dry_run,
            gpus=options.gpus,
            debug=options.debug,
            json=options.json,
        )

    command.__doc__ = RECIPE_SETTINGS[recipe].help
    return verb(command)


def train(
    recipe: str,
    words: Sequence[str],
    flags: Mapping[str, Any],
    *,
    nproc: int,
    rehearse: bool = False,
    dry_run: bool = False,
    gpus: str | None = None,
    debug: bool = False,
    json: bool = False,
) -> int:
    """Run a recipe in this process, or in ``nproc`` new ones; returns the exit code.

    ``flags`` are options by name, as for :func:`isthmus.config.load.load_config`.
    """
    from isthmus.cli import process
    from isthmus.cli.default_out import hand_to_ranks
    from isthmus.platforms.rank_env import is_one_of_several_ranks, rank, world_size

    if debug:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("isthmus").setLevel(logging.DEBUG)
    if gpus is not None and not dry_run:
        raise UsageError(
            "--gpus is for --dry-run; a run uses the GPUs of this machine. Leave it out, or add --dry-run."
        )
    joined = is_one_of_several_ranks()  # first: an error in the config is then reported once for all tasks of Slurm
    config = _load(recipe, words, flags, rehearse=rehearse, is_rank=joined and not process.started_by_isthmus)
    if rehearse and (joined or nproc == 1 or dry_run):
        config = _rehearsal(config, world_size() if joined else nproc)
    if dry_run:
        if rank() == 0:
            if json:
                print(json_module.dumps(config.model_dump(mode="json"), indent=2), flush=True)
            _check_only(config, gpus, joined=joined, nproc=nproc)
        return 0
    if rank() == 0 and not process.started_by_isthmus:  # before the imports, which take seconds
        note(_run_line(config, world_size() if joined else nproc))
    if not joined:  # ranks of other launchers check the data together
        _check_data(config)
    if not joined and nproc > 1:
        hand_to_ranks(process.default_out)
        return run_ranks(nproc, debug=debug)
    if joined and not process.started_by_isthmus and nproc > 1:
        raise UsageError(
            f"--nproc {nproc} starts ranks, but this process is one already (rank {rank()}). Omit --nproc."
        )
    if not process.started_by_isthmus:
        # Until the recipe handles it, after some imports.
        signal.signal(signal.SIGTERM, _stopped_early)
    from isthmus.recipes.run import run_recipe

    result = run_recipe(config)
    if rank() == 0:
        show(result, as_json=json)
        if not json:
            note("\n  ".join(["next:", *result.next_commands(config)]))
    return 0


def _check_data(config: RunConfig) -> None:
    """Read the first records, before the imports, which take seconds."""
    data = config.data
    if data.mock or data.on_error == "skip":
        return
    from isthmus.recipes.data.record_check import check_records

    sources = [data.files, *(data_set.files for data_set in data.sets.values()), data.valid_files, data.test_files]
    check_records(filter(None, sources), RECIPE_SETTINGS[config.recipe].records, data.columns)


def _load(recipe: str, words: Sequence[str], flags: Mapping[str, Any], *, rehearse: bool, is_rank: bool) -> RunConfig:
    """The config of the command, and in ``process`` its run folder; ``is_rank``: another program started this rank."""
    from isthmus.cli import process
    from isthmus.cli.cli_args import config_and_overrides
    from isthmus.cli.default_out import default_out
    from isthmus.config.load import load_config

    file, overrides = config_and_overrides(words)
    chosen: list[str] = []

    def choose_out(settings: Mapping[str, Any]) -> str:
        chosen.append(default_out(settings, is_rank=is_rank))
        return chosen[0]

    config = load_config(recipe, file, overrides, flags, default_out=choose_out)
    if rehearse:
        config = config.model_copy(update={"out": f"{config.out.rstrip('/')}-rehearsal"})
    process.run_folder = Path(config.out)
    if chosen and not process.started_by_isthmus:
        process.default_out = chosen[0]
        note(f"out {chosen[0]}, as --out is not given; add --out {chosen[0]} to resume this run")
    return config


def _check_only(config: RunConfig, gpus: str | None, *, joined: bool, nproc: int) -> None:
    """The checks of a run, and their findings on stderr; raises the first error."""
    from isthmus.platforms.rank_env import local_world_size, world_size

    ranks, here = (world_size(), local_world_size()) if joined else (nproc, nproc)
    planned = None if gpus is None else planned_gpus(gpus)
    if planned is not None and not joined:  # all its GPUs, unless --nproc is given
        here = nproc if nproc > 1 else planned.gpus_per_node
        ranks = here * planned.nodes
    if planned is not None and here > planned.gpus_per_node:
        raise UsageError(
            f"{here} ranks of a machine need one GPU each, and --gpus {gpus} has {planned.gpus_per_node}. Use --nproc "
            f"{planned.gpus_per_node}."
        )
    note(_run_line(config, ranks))
    if not joined:
        _check_data(config)
    from isthmus.platforms.described import described_platform
    from isthmus.recipes.dry_run import dry_run

    machine = None
    if planned is not None and planned.part is not None:
        machine = described_platform(planned.part, planned.gpus_per_node, planned.memory_bytes, config.platform)
    dry_run(config, world_size=ranks, ranks_here=here, report=note, machine=machine, runs_here=False)
    note("no run was started (--dry-run; --json prints the complete config)")


def planned_gpus(gpus: str) -> PlannedGpus:
    from isthmus.tools.planner.planned_gpus import parse_machine

    if gpus.strip().isdigit():
        raise UsageError(f"--gpus {gpus} does not name a GPU. Give --gpus {gpus.strip()}xH100.")
    return parse_machine(gpus, None, None)


def run_ranks(nproc: int, *, debug: bool, script: bool = False) -> int:
    """Run this command line as ``nproc`` ranks and print the first failure; ``script`` as for ``launch``."""
    from isthmus.cli import process
    from isthmus.cli.exit import ExitStatus, print_error, save_traceback
    from isthmus.launch.local_launcher import launch

    failure = launch(process.argv, nproc, debug=debug, script=script)
    if failure is None:
        return 0
    message = process.naming_default_out(failure.message)
    if failure.exit_code == 130 and process.run_folder is not None:
        from isthmus.recipes.run_dir import RunDir

        message = process.naming_default_out(RunDir(process.run_folder).interrupted())
    status = ExitStatus(failure.exit_code, message, failure.traceback)
    print_error(save_traceback(status, process.run_folder), debug=debug)
    return status.exit_code


def _rehearsal(config: RunConfig, ranks: int) -> RunConfig:
    """The config of a rehearsal; prints what differs from the run."""
    from isthmus.platforms.rank_env import rank
    from isthmus.recipes.plan.rehearsal import rehearse

    config, changes = rehearse(config, ranks)
    if rank() == 0:
        what = (
            "rehearsal, not the run: a small model with random weights on CPUs; loss and speed do not predict the run's"
        )
        lines = [f"{what}. Settings that differ:"]
        note("\n  ".join([*lines, *changes]))
    return config


def _run_line(config: RunConfig, ranks: int) -> str:
    """The first line of a run: what it trains, on what, where the output goes."""
    data, train = config.data, config.train
    files = [*data.files, *data.sets] or ["random tokens"]
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    length = counted(train.epochs or 1, "epoch") if train.steps is None else counted(train.steps, "step")
    return (
        f"isthmus {__version__}  {config.recipe}  model {config.model.path or 'from model.config'}  "
        f"data {', '.join(files[:3])}{more}  {length}  {counted(ranks, 'rank')}  out {config.out}"
    )


def _stopped_early(number: int, frame: FrameType | None) -> NoReturn:
    raise Preempted("stopped by a signal before training began.")
