"""``isthmus launch``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from isthmus.cli.terminal import note, say
from isthmus.cli.train_verbs import TrainOptions, flags_of, planned_gpus
from isthmus.config.recipes import RECIPE_SETTINGS
from isthmus.errors import UsageError

if TYPE_CHECKING:
    from isthmus.config.schema import RunConfig
    from isthmus.launch.engines.job import EngineName
    from isthmus.platforms.base import Platform

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="slurm|kubernetes|ray|ssh RECIPE [CONFIG.yaml|KEY=VALUE]...",
        help="The scheduler, and the command of the run without isthmus: its recipe, config file and settings.",
        show_default=False,
    ),
]
Nproc = Annotated[int, typer.Option(min=1, max=1024, metavar="N", help="Number of ranks on each machine.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted.")]
Gpus = Annotated[str | None, typer.Option(metavar="NxNAME", help="GPUs of a machine, such as 8xMI300X; one rank each.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions(TrainOptions):
    words: Words = None
    nproc: Nproc = 1
    dry_run: DryRun = False
    gpus: Gpus = None


def launch(options: LaunchOptions) -> int:
    """Start a run on many machines: with Slurm, Kubernetes, a Ray cluster, or a list of machines over ssh.

    The options are those of the recipe; settings launch.* describe the machines.
    """
    from isthmus.cli.cli_args import config_and_overrides
    from isthmus.cli.default_out import default_out
    from isthmus.config.load import load_config
    from isthmus.launch.engines import engine_of
    from isthmus.launch.engines.job import Job, check_job

    engine, recipe, words = _split(options.words or [])
    file, overrides = config_and_overrides(words)
    config = load_config(
        recipe, file, overrides, flags_of(options), default_out=lambda settings: default_out(settings, is_rank=True)
    )
    platform, ranks_per_node = _machine(config, options)
    run_words = [word for word in words if not word.startswith("launch.")]
    command = (recipe, *run_words, *_option_words(options))
    job = Job(config=config, command=command, ranks_per_node=ranks_per_node, platform=platform)
    check_job(job, engine)
    scheduler = engine_of(engine)
    if not options.dry_run:
        return scheduler.submit(job)
    say(scheduler.render(job).rstrip("\n"), exact=True)
    check = shlex.join(["isthmus", *command, "--dry-run", *(["--gpus", options.gpus] if options.gpus else [])])
    note(f"nothing was submitted (--dry-run); `{check}` also checks model and data")
    return 0


def _split(words: Sequence[str]) -> tuple[EngineName, str, Sequence[str]]:
    from isthmus.launch.engines.job import EngineName

    engines = get_args(EngineName)
    if not words or words[0] not in engines:
        raise UsageError(
            f"isthmus launch needs a scheduler, {', '.join(engines)}, got {words[0] if words else 'none'}. Example: "
            "isthmus launch slurm sft run.yaml --gpus 8xMI300X launch.nodes=2."
        )
    if len(words) < 2 or words[1] not in RECIPE_SETTINGS:
        raise UsageError(
            f"isthmus launch {words[0]} needs a recipe, {', '.join(RECIPE_SETTINGS)}, got "
            f"{words[1] if len(words) > 1 else 'none'}."
        )
    engine: EngineName = words[0]  # type: ignore[assignment]
    return engine, words[1], words[2:]


def _machine(config: RunConfig, options: LaunchOptions) -> tuple[Platform, int]:
    """The platform of the machines and their ranks; nothing of this machine counts."""
    from isthmus.platforms.cpu import CpuPlatform
    from isthmus.platforms.cuda import CudaPlatform
    from isthmus.platforms.described import described_platform
    from isthmus.platforms.rocm import RocmPlatform

    if options.gpus is not None:
        planned = planned_gpus(options.gpus)
        if planned.nodes > 1:
            raise UsageError(f"--gpus {options.gpus} are those of a machine. Set launch.nodes={planned.nodes}.")
        if options.nproc > planned.gpus_per_node:
            raise UsageError(
                f"--nproc {options.nproc} ranks need one GPU each, and --gpus {options.gpus} has "
                f"{planned.gpus_per_node}. Leave --nproc out."
            )
        assert planned.part is not None
        gpus = options.nproc if options.nproc > 1 else planned.gpus_per_node
        return described_platform(planned.part, gpus, planned.memory_bytes, config.platform), gpus
    for platform in (CpuPlatform, CudaPlatform, RocmPlatform):
        if platform.name == config.platform:
            return platform(reason=f"platform={config.platform} is set"), options.nproc
    raise UsageError(
        "which GPUs do the machines have? Give --gpus, such as 8xMI300X, or platform=cpu, cuda or rocm with --nproc."
    )


def _option_words(options: LaunchOptions) -> list[str]:
    """The options of the run as words."""
    texts = {
        "--model": options.model,
        "--out": options.out,
        "--hf-every": options.hf_every,
        "--push": options.push,
        "--accept-changes": options.accept_changes,
    }
    switches = {
        "--public": options.public,
        "--trust": options.trust,
        "--rehearse": options.rehearse,
        "--debug": options.debug,
        "--json": options.json,
    }
    return [
        *(word for name, value in texts.items() if value is not None for word in (name, str(value))),
        *(word for file in options.data or () for word in ("--data", file)),
        *(name for name, is_on in switches.items() if is_on),
    ]
