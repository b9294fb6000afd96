"""``isthmus launch``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from isthmus.cli.options import argument, config_and_overrides, flag, option
from isthmus.cli.terminal import note, say
from isthmus.cli.train_verbs import TrainOptions, default_out, flags_of, planned_gpus
from isthmus.config.recipes import RECIPE_SETTINGS
from isthmus.errors import UsageError

if TYPE_CHECKING:
    from isthmus.config.schema import RunConfig
    from isthmus.launch.engines.job import EngineName
    from isthmus.platforms.base import Platform

_TEXTS = ("model", "out", "hf_every", "push", "accept_changes")
_SWITCHES = ("public", "trust", "rehearse", "debug", "json")
"""Options of the run that its command on the machines gets, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions(TrainOptions):
    words: list[str] | None = argument(
        "slurm|kubernetes|ray|ssh RECIPE [CONFIG.yaml|KEY=VALUE]...",
        "The scheduler, and the command of the run without isthmus: its recipe, config file and settings.",
        None,
        show_default=False,
    )
    nproc: int = option("N", "Number of ranks on each machine.", 1, min=1, max=1024)
    dry_run: bool = flag("Print what would be submitted.")
    gpus: str | None = option("NxNAME", "GPUs of a machine, such as 8xMI300X; one rank each.")


def launch(options: LaunchOptions) -> int:
    """Start a run on many machines: with Slurm, Kubernetes, a Ray cluster, or a list of machines over ssh.

    The options are those of the recipe; settings launch.* describe the machines.
    """
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
    texts = {f"--{name.replace('_', '-')}": getattr(options, name) for name in _TEXTS}
    switches = {f"--{name}": getattr(options, name) for name in _SWITCHES}
    return [
        *(word for name, value in texts.items() if value is not None for word in (name, str(value))),
        *(word for file in options.data or () for word in ("--data", file)),
        *(name for name, is_on in switches.items() if is_on),
    ]
