"""What ``isthmus config from-env`` does: a script of ROCm's Megatron-LM, as a config file or as a run."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from isthmus.cli.translate import start_command
from isthmus.config.dialects.render import as_json as translation_as_json
from isthmus.config.dialects.render import as_yaml, remark_line
from isthmus.config.dialects.rocm_scripts.common_variables import NODE, ScriptRun
from isthmus.config.dialects.rocm_scripts.read_variables import (
    SCRIPTS,
    batch_names,
    read_script,
    remark_on_full_nodes,
    started,
)
from isthmus.config.dialects.rocm_scripts.rocm_log import summary
from isthmus.config.load import load_config
from isthmus.errors import DataError, MissingInput, UsageError


def print_config(script: str, words: Sequence[str], *, as_json: bool) -> int:
    """Print the config of the run that a script would start; it is checked before."""
    run = _read(script, words)
    remark_on_full_nodes(script, run)
    _refuse_misfit(run, script)
    load_config(None, None, [], {"recipe": run.translation.recipe, **run.translation.settings})
    if as_json:
        print(json.dumps(translation_as_json(run.translation) | {"command": _start(run)}, indent=2))
    else:
        print(as_yaml(run.translation, _title(run)), end="")
    return 0


def run_script(script: str, words: Sequence[str]) -> int:
    """Do what a script would; with DRY_RUN=1 show it.

    Raises:
        UsageError: the words are wrong, or the global batch cannot be dealt out over the ranks of this machine.
        MissingInput, DataError: NO_TRAINING=1, and the log is not there, or has no iterations.
    """
    run = _read(script, words)
    os.environ.update(run.exports)
    nproc, why = _ranks_here(run)
    world = run.translation.world
    ranks = nproc * world.nnodes
    log = Path(run.train_log)
    if run.no_training:
        return _summarise(run, log, ranks)
    misfit = run.misfit(ranks, batch_names(script))
    file = log.with_suffix(".yaml")
    command = ["pretrain", str(file)] if nproc == 1 else ["pretrain", str(file), "--nproc", str(nproc)]
    if world.nnodes > 1:
        command = ["pretrain", str(file)]
    shown = " ".join(["isthmus", *map(shlex.quote, command)])
    if world.nnodes > 1:
        shown = shlex.join(_torchrun(run, nproc, command))
    said = [f"{remark_line(remark)}" for remark in run.translation.remarks]
    said += [f"{world.nnodes} x {nproc} ranks ({why}), this is node {world.node_rank}"]
    said += [f"log file {log}{'' if run.tee else ', and nothing on the screen'}", f"command: {shown}"]
    settings = {"recipe": run.translation.recipe, **run.translation.settings}
    if run.dry_run:
        from isthmus.recipes.setup.validation import dry_run

        print(as_yaml(run.translation, _title(run)), end="")
        if misfit is not None:
            verdict = f"would be refused: {misfit}."
        else:
            verdict = dry_run(load_config(None, None, [], settings), world_size=ranks, ranks_here=nproc)
        print("\n".join(f"# {line}" for line in (*said[len(run.translation.remarks) :], *verdict.splitlines())))
        return 0
    if misfit is not None:
        raise UsageError(f"{run.script}: {misfit}.")
    load_config(None, None, [], settings)
    log.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(as_yaml(run.translation, _title(run)), encoding="utf-8")
    with _into(log, on_screen=run.tee):
        print("\n".join(said), file=sys.stderr, flush=True)
        code = _train(run, nproc, command)
    if code == 0:
        _summarise(run, log, ranks)
    elif not run.tee:
        print(f"isthmus: ended with exit code {code}; {log} says why.", file=sys.stderr)
    return code


def _read(script: str, words: Sequence[str]) -> ScriptRun:
    if script not in SCRIPTS:
        raise UsageError(f"{script} is no script that is known. Use {', '.join(SCRIPTS)}.")
    return started(read_script(script, os.environ, words), datetime.now())


def _refuse_misfit(run: ScriptRun, script: str) -> None:
    """Refuse a global batch that no number of ranks can take, with sizes for the nodes that scripts are written for."""
    mbs, bs = run.setting("train.micro_batch_size"), run.setting("train.global_batch_size")
    if bs % mbs:
        nodes = NODE * run.translation.world.nnodes
        raise UsageError(f"{run.script}: {run.misfit(nodes, batch_names(script)) or f'{bs} is no multiple of {mbs}'}.")


def _title(run: ScriptRun) -> str:
    return f"{_start(run)}: what {run.script} was told to do.\nLog of the script: {run.train_log}"


def _start(run: ScriptRun) -> str:
    """The command that does the same from a file: ranks and variables of libraries are in no config."""
    exports = [
        f"{name}=..." if "TOKEN" in name else f"{name}={shlex.quote(text)}" for name, text in run.exports.items()
    ]
    return " ".join([*exports, start_command(run.translation.recipe, run.translation.world, "FILE")])


def _ranks_here(run: ScriptRun) -> tuple[int, str]:
    """Ranks on this machine, and why so many."""
    if (chosen := run.translation.world.nproc_per_node) is not None:
        return chosen, "NPROC"
    from isthmus.platforms.detect import detect

    platform = detect(run.setting("platform", "auto"))
    count = platform.device_count()
    if count is None:
        return 1, f"{platform.name}: {platform.reason}; NPROC sets another number"
    return count, f"one for each GPU: {platform.reason}"


def _torchrun(run: ScriptRun, nproc: int, command: Sequence[str]) -> list[str]:
    world = run.translation.world
    where = ["--nnodes", str(world.nnodes), "--nproc-per-node", str(nproc), "--node-rank", str(world.node_rank)]
    where += ["--master-addr", str(world.master_addr), "--master-port", str(world.master_port or 6000)]
    return [sys.executable, "-m", "torch.distributed.run", *where, "-m", "isthmus", *command]


def _train(run: ScriptRun, nproc: int, command: list[str]) -> int:
    """Train as the config file says, and tell the end; returns the exit code."""
    if run.translation.world.nnodes > 1:
        return _forwarding(_torchrun(run, nproc, command))
    from isthmus.cli import process_state
    from isthmus.cli.exit import ending_of, keep_traceback, say
    from isthmus.cli.run_recipe import Request, train

    process_state.argv = command
    request = Request(
        words=[command[1]], model=None, data=None, out=None, nproc=nproc, hf_every=None, dry_run=False, debug=False,
        json=False,
    )  # fmt: skip
    ending = keep_traceback(ending_of(lambda: train("pretrain", request)), process_state.run_folder)
    say(ending, debug=False)
    return ending.exit_code


def _forwarding(command: Sequence[str]) -> int:
    """Run a program that is told of the signals which this process gets; a terminal tells it of Ctrl-C itself."""
    child = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: child.send_signal(received))
    signal.signal(signal.SIGINT, lambda _number, _frame: None)
    return child.wait()


@contextmanager
def _into(log: Path, *, on_screen: bool) -> Iterator[None]:
    """Send what this process and its children print into a file, and to the screen as well or not."""
    sys.stdout.flush()
    sys.stderr.flush()
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)  # also for tee, which trains on without one
    # In a session of its own it hears of no signal, and so has all that is said up to the end.
    words = ["tee", "--", str(log)]
    tee = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True) if on_screen else None
    if tee is not None and tee.stdin is not None:
        os.dup2(tee.stdin.fileno(), target)
    saved = [os.dup(1), os.dup(2)]
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.close(target)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in enumerate(saved, start=1):
            os.dup2(copy, number)
            os.close(copy)
        if tee is not None:
            tee.communicate()


def _summarise(run: ScriptRun, log: Path, ranks: int) -> int:
    """Print the means over the iterations of a log, and add them to it."""
    if not log.is_file():
        raise MissingInput(f"NO_TRAINING=1 reads {log}, and there is none. Set TRAIN_LOG, or LOG_DIR and EXP_NAME.")
    tokens = run.setting("train.global_batch_size") * run.setting("data.seq_length")
    lines = summary(
        log.read_text(encoding="utf-8", errors="replace"), tokens_per_step=tokens, ranks=ranks, skip=run.summary_from,
        with_throughput=run.with_throughput,
    )  # fmt: skip
    if run.no_training and not lines:
        raise DataError(f"{log} has no line of an iteration, so there is nothing to take means of. Set TRAIN_LOG.")
    with log.open("a", encoding="utf-8") as file:
        for line in lines:
            print(line, flush=True)
            file.write(line + "\n")
    return 0
