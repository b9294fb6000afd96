"""``isthmus sft``, ``dpo``, ``kto``, ``reward``, ``distill``, ``grpo`` and ``pretrain``."""

from __future__ import annotations

import json as json_module
import logging
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from isthmus import __version__
from isthmus.cli.completion import complete_word
from isthmus.cli.options import (
    PUBLIC,
    PUSH,
    TRUST,
    ResultOptions,
    argument,
    config_and_overrides,
    flag,
    option,
    verb,
)
from isthmus.cli.terminal import note, show
from isthmus.config.recipes import RECIPE_SETTINGS, RecipeName
from isthmus.data.readers.data_names import describe_sources
from isthmus.errors import Preempted, UsageError, counted

if TYPE_CHECKING:
    from isthmus.config.schema import RunConfig
    from isthmus.tools.planner.planned_gpus import PlannedGpus

WORDS = partial(
    argument,
    "CONFIG.yaml|KEY=VALUE",
    "A config file or preset:NAME, and settings such as optim.lr=2e-5.",
    None,
    show_default=False,
    autocompletion=complete_word,
)
MODEL = partial(option, "MODEL", "Hugging Face model folder, Hub id, or preset:NAME (random weights).")
DATA = partial(
    option,
    "FILE...",
    f"Training data: {describe_sources()}; or prefixes of prepared files (.bin and .idx). More: data.*",
)
NPROC = partial(option, "N", "Number of ranks to start on this machine.", 1, min=1, max=1024)
RUNS = "runs"
"""Folder of the run folders of commands without ``--out``."""
_DEFAULT_OUT = "ISTHMUS_DEFAULT_OUT"
"""Environment variable with the run folder that a command without ``--out`` has chosen, for its ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions(ResultOptions):
    words: list[str] | None = WORDS()
    model: str | None = MODEL()
    data: list[str] | None = DATA()
    out: str | None = option(
        "DIR", "Run folder: metrics, checkpoints and the exported model. Default: runs/RECIPE-MODEL-N, a new one."
    )
    nproc: int = NPROC()
    hf_every: int | None = option("N", "Also export to Hugging Face format every N steps.")
    push: str | None = PUSH()
    public: bool = PUBLIC()
    accept_changes: str | None = option(
        "NAME,...", "Resume with other values of these settings than the checkpoint's, such as lr."
    )
    trust: bool = TRUST()
    rehearse: bool = flag(
        "Train a small model of the same architecture and layout for some steps on CPUs, in OUT-rehearsal."
    )
    dry_run: bool = flag(
        "Check all that is known without training, and print the decisions and the size of the run; with --json also "
        "the complete config."
    )
    gpus: str | None = option("NxNAME", "With --dry-run: check against a machine with these GPUs, such as 8xMI300X.")


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
    if (code := start_ranks(nproc, debug=debug)) is not None:
        return code
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


def start_ranks(nproc: int, *, debug: bool, script: bool = False) -> int | None:
    """Run this command line as ``nproc`` ranks and print the first failure; returns the exit code.

    None if this process is a rank already, or the only one. ``script`` as for ``launch``.
    """
    from isthmus.cli import process
    from isthmus.launch.local_launcher import launch
    from isthmus.platforms.rank_env import is_one_of_several_ranks, rank

    if nproc == 1:
        return None
    if is_one_of_several_ranks():
        if process.started_by_isthmus:
            return None
        raise UsageError(
            f"--nproc {nproc} starts ranks, but this process is one already (rank {rank()}). Omit --nproc."
        )
    hand_to_ranks(process.default_out)
    failure = launch(process.argv, nproc, debug=debug, script=script)
    if failure is None:
        return 0
    message = process.naming_default_out(failure.message)
    if failure.exit_code == 130 and process.run_folder is not None:
        from isthmus.recipes.run_dir import RunDir

        message = process.naming_default_out(RunDir(process.run_folder).interrupted())
    status = process.ExitStatus(failure.exit_code, message, failure.traceback)
    process.print_error(process.save_traceback(status, process.run_folder), debug=debug)
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


def default_out(settings: Mapping[str, Any], *, is_rank: bool) -> str:
    """The folder with the next free number; all ranks of ``--nproc`` get that of the command which starts them.

    Args:
        settings: of the run, not validated yet.
        is_rank: whether another program has started this rank.
    """
    if (chosen := os.environ.get(_DEFAULT_OUT)) is not None:
        return chosen
    if is_rank:
        raise UsageError(
            "the ranks that torchrun or Slurm starts need one run folder, from which a restart resumes. Name it with "
            "--out."
        )
    prefix = f"{settings.get('recipe')}-{_model_name(settings.get('model'))}"
    pattern = re.compile(rf"{re.escape(prefix)}-(\d+)(-rehearsal)?")
    names = os.listdir(RUNS) if os.path.isdir(RUNS) else []
    numbers = [int(match[1]) for name in names if (match := pattern.fullmatch(name))]
    return os.path.join(RUNS, f"{prefix}-{max(numbers, default=0) + 1}")


def hand_to_ranks(out: str | None) -> None:
    """Let the ranks that this process starts use the folder; None: they have ``--out``."""
    if out is not None:
        os.environ[_DEFAULT_OUT] = out


def _model_name(model: Any) -> str:
    section = {"path": model} if isinstance(model, str) else model if isinstance(model, dict) else {}
    config = section.get("config")
    model_type = config.get("model_type") if isinstance(config, dict) else None
    path = Path(str(section.get("path") or model_type or "model").removeprefix("preset:"))
    name = path.parent.name if path.name in ("hf", "adapter") and path.parent.name else path.name
    return re.sub(r"[^\w.-]+", "-", name.removesuffix(".yaml").removesuffix(".yml")) or "model"
