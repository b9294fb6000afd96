"""``isthmus run``."""

from __future__ import annotations

import signal
import sys
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.options import Debug
from isthmus.cli.train_verbs import Nproc, run_ranks
from isthmus.config.dialects.scripts.record_script import SHELL_SUFFIXES
from isthmus.errors import UsageError

Script = Annotated[Path, typer.Argument(metavar="SCRIPT.py", help="A script of a Megatron-LM checkout, or your own.")]
Args = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Its arguments, unchanged.", show_default=False)]
PlatformName = Annotated[str, typer.Option("--platform", metavar="NAME", help="auto, cpu, cuda or rocm.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptOptions:
    script: Script
    args: Args = None
    nproc: Nproc = 1
    platform: PlatformName = "auto"
    debug: Debug = False


def run(options: ScriptOptions) -> int:
    """Run an unmodified script of Megatron-LM on ROCm, CUDA or a CPU, without TransformerEngine and Apex.

    Options of isthmus come before SCRIPT.py. Everything that is done for the script is printed, one line each.
    """
    if options.script.suffix in SHELL_SUFFIXES:
        raise UsageError(
            f"{options.script} is a shell script, and isthmus run takes the Python script that it starts. "
            f"`isthmus config from-megatron --run {options.script}` shows its training run as a config of Isthmus."
        )
    from isthmus.cli import process
    from isthmus.platforms.rank_env import is_one_of_several_ranks, rank

    joined = is_one_of_several_ranks()
    if not joined and options.nproc > 1:
        return run_ranks(options.nproc, debug=options.debug, script=True)
    if joined and not process.started_by_isthmus and options.nproc > 1:
        raise UsageError(
            f"--nproc {options.nproc} starts ranks, but this process is one already (rank {rank()}). Omit --nproc."
        )
    if process.started_by_isthmus:  # the script decides what a signal does, as under torchrun
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    from isthmus.platforms.detect import detect

    with warnings.catch_warnings():  # isthmus.engine hides some of megatron's
        from isthmus.engine.upstream.megatron_script import run_script

    from isthmus.recipes.model.bridge_modules import provide_bridge

    provide_bridge()
    say = partial(print, "isthmus run:", file=sys.stderr, flush=True) if rank() == 0 else lambda line: None
    run_script(options.script, options.args or [], detect(options.platform).name, say)
    return 0
