"""``isthmus config from-env``: prints or starts a run of ROCm Megatron-LM's scripts."""

from __future__ import annotations

import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from isthmus.cli.config.translate import print_translation, start_command
from isthmus.cli.terminal import note, say
from isthmus.config.dialects.rocm_scripts.read_variables import (
    SCRIPTS,
    batch_names,
    read_script,
    remark_on_full_nodes,
    with_start_time,
)
from isthmus.config.dialects.rocm_scripts.script_run import NODE, ScriptRun, summary
from isthmus.config.dialects.translation import as_yaml, remark_line
from isthmus.config.load import load_config
from isthmus.config.schema import RunConfig
from isthmus.errors import DataError, IsthmusError, MissingInput, UsageError


def print_config(script: str, words: Sequence[str], *, as_json: bool) -> int:
    run = _read(script, words)
    remark_on_full_nodes(script, run)
    batch_size_error = run.batch_size_error(NODE * run.translation.world.nnodes, batch_names(script))
    if batch_size_error is not None and run.setting("train.global_batch_size") % run.setting("train.micro_batch_size"):
        raise UsageError(f"{run.script}: {batch_size_error}.")
    return print_translation(run.translation, as_json=as_json, command=_command(run), title=_title(run))


def run_script(script: str, words: Sequence[str]) -> int:
    """Train as a script would. With DRY_RUN=1 print the plan; with NO_TRAINING=1 summarize the existing log."""
    run = _read(script, words)
    os.environ.update(run.exports)
    nproc, why = _ranks_here(run)
    world = run.translation.world
    ranks = nproc * world.nnodes
    log = Path(run.train_log)
    if run.no_training:
        return _summarise(run, log, ranks)
    batch_size_error = run.batch_size_error(ranks, batch_names(script))
    file = log.with_suffix(".yaml")
    command = [run.translation.recipe, str(file), *(["--nproc", str(nproc)] if nproc > 1 and world.nnodes == 1 else [])]
    command += ["--rehearse"] if run.rehearse else []
    shown = shlex.join(["isthmus", *command] if world.nnodes == 1 else _torchrun(run, nproc, command))
    plan = [f"{world.nnodes} x {nproc} ranks ({why}), this is node {world.node_rank}"]
    plan += [f"log file {log}{'' if run.tee else ', no output on the terminal'}", f"command: {shown}"]
    settings = {"recipe": run.translation.recipe, **run.translation.settings}
    if run.dry_run:
        say(as_yaml(run.translation, _title(run)), end="", exact=True)
        try:
            if batch_size_error is not None:
                raise UsageError(f"{run.script}: {batch_size_error}.")
            _check_only(run, load_config(None, None, [], settings), ranks, nproc, plan)
            code = 0
        except IsthmusError as error:
            plan.append(f"this run would fail here: {error}")
            code = error.exit_code
        say("\n".join(f"# {line}" for part in plan for line in part.splitlines()))
        return code
    if batch_size_error is not None:
        raise UsageError(f"{run.script}: {batch_size_error}.")
    load_config(None, None, [], settings)
    log.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(as_yaml(run.translation, _title(run)), encoding="utf-8")
    with _redirected_to(log, on_screen=run.tee):
        note("\n".join([*map(remark_line, run.translation.remarks), *plan]))
        code = _train(run, nproc, command)
    if code == 0 and not run.rehearse:  # the speed of a small model is no measurement
        _summarise(run, log, ranks)
    elif not run.tee:
        note(f"isthmus: ended with exit code {code}; the error is in {log}.")
    return code


def _check_only(run: ScriptRun, config: RunConfig, ranks: int, nproc: int, lines: list[str]) -> None:
    """Append the findings to ``lines``, as ``--dry-run`` prints them; raises the first error."""
    from isthmus.recipes.dry_run import dry_run
    from isthmus.recipes.plan.rehearsal import rehearse

    if run.rehearse:
        config, changes = rehearse(config, ranks)
        lines += changes
    dry_run(config, world_size=ranks, ranks_here=nproc, report=lines.append)
    lines.append("no run was started (DRY_RUN=1)")


def _read(script: str, words: Sequence[str]) -> ScriptRun:
    if script not in SCRIPTS:
        raise UsageError(f"{script} is not a known script. Use {', '.join(SCRIPTS)}.")
    return with_start_time(read_script(script, os.environ, words), datetime.now())


def _title(run: ScriptRun) -> str:
    return f"{_command(run)}: the same run as {run.script}.\nLog of the script: {run.train_log}"


def _command(run: ScriptRun) -> str:
    """Ranks and library variables are not part of a config, so the command has them."""
    exports = [
        f"{name}=..." if "TOKEN" in name else f"{name}={shlex.quote(text)}" for name, text in run.exports.items()
    ]
    return " ".join([*exports, start_command(run.translation.recipe, run.translation.world, "FILE")])


def _ranks_here(run: ScriptRun) -> tuple[int, str]:
    """The number of ranks on this machine, and the reason."""
    world = run.translation.world
    if world.nproc_per_node is not None:
        return world.nproc_per_node, "NPROC"
    if run.rehearse:
        sizes = [run.setting(f"parallel.{name}", 1) for name in ("tp", "pp", "cp", "ep")]
        tp, pp, cp, ep = (size if isinstance(size, int) else 1 for size in sizes)  # load_config reports other values
        least = math.lcm(tp * cp, tp * ep) * pp
        return math.ceil(least / world.nnodes), "as the layout needs; NPROC sets another number"
    from isthmus.platforms.detect import detect

    platform = detect(run.setting("platform", "auto"))
    count = platform.device_count()
    if count is None:
        return 1, f"{platform.name}: {platform.reason}; NPROC sets another number"
    return count, f"one per GPU: {platform.reason}"


def _torchrun(run: ScriptRun, nproc: int, command: Sequence[str]) -> list[str]:
    world = run.translation.world
    where = ["--nnodes", str(world.nnodes), "--nproc-per-node", str(nproc), "--node-rank", str(world.node_rank)]
    where += ["--master-addr", str(world.master_addr), "--master-port", str(world.master_port or 6000)]
    return [sys.executable, "-m", "torch.distributed.run", *where, "-m", "isthmus", *command]


def _train(run: ScriptRun, nproc: int, command: list[str]) -> int:
    """Train with the config file, print the result and return the exit code."""
    if run.translation.world.nnodes > 1:
        return _run_child(_torchrun(run, nproc, command))
    from isthmus.cli import process
    from isthmus.cli.train_verbs import train

    process.argv = command
    status = process.save_traceback(
        process.exit_status_of(
            lambda: train(run.translation.recipe, command[1:2], {}, nproc=nproc, rehearse=run.rehearse)
        ),
        process.run_folder,
    )
    process.print_error(status, debug=False)
    return status.exit_code


def _run_child(command: Sequence[str]) -> int:
    """Run a program and forward SIGTERM and SIGHUP to it. The terminal sends Ctrl-C to both."""
    child = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: child.send_signal(received))
    signal.signal(signal.SIGINT, lambda _number, _frame: None)
    return child.wait()


@contextmanager
def _redirected_to(log: Path, *, on_screen: bool) -> Iterator[None]:
    """Redirect the output of this process and its children to a file, with ``on_screen`` also to the terminal."""
    sys.stdout.flush()
    sys.stderr.flush()
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)  # also if tee cannot open it
    # In its own session tee gets no signal, so it writes all output.
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
    if not log.is_file():
        raise MissingInput(f"NO_TRAINING=1 reads {log}, which does not exist. Set TRAIN_LOG, or LOG_DIR and EXP_NAME.")
    tokens = run.setting("train.global_batch_size") * run.setting("data.seq_length")
    lines = summary(
        log.read_text(encoding="utf-8", errors="replace"),
        tokens_per_step=tokens,
        ranks=ranks,
        skip=run.summary_from,
        with_throughput=run.with_throughput,
    )
    if run.no_training and not lines:
        raise DataError(f"{log} has no line of an iteration, so there are no means. Set TRAIN_LOG.")
    with log.open("a", encoding="utf-8") as file:
        for line in lines:
            say(line)
            file.write(line + "\n")
    return 0
