"""Translates the variables of a script and adds remarks on likely mistakes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from isthmus.config.dialects.rocm_scripts import deepseek_script, llama_script, sft_script
from isthmus.config.dialects.rocm_scripts.script_run import NODE, TABLES, TIME, ScriptRun
from isthmus.config.dialects.script_variables import Variables

SCRIPTS = ("llama2", "llama3", "deepseek_v2", *sft_script.MODELS)


def read_script(script: str, environment: Mapping[str, str], arguments: Sequence[str] = ()) -> ScriptRun:
    """The run of ``train_<script>.sh``, or of ``<script>/03-train-dense.sh``. A UsageError contains all errors.

    ``arguments`` are ``NAME=VALUE`` and win over the environment: variables of the script, dotted settings, or library
    variables such as ``NCCL_IB_HCA``.
    """
    fine_tuning = script in sft_script.MODELS
    table = TABLES["sft" if fine_tuning else "deepseek_v2" if script == "deepseek_v2" else "llama"]
    known = [*table["variables"].split(), *TABLES["common"].split()]
    v = Variables(known, environment, arguments, exported=TABLES["exported"].split())
    if fine_tuning:
        run = sft_script.read_sft(script, v)
    else:
        run = deepseek_script.read_deepseek(v) if script == "deepseek_v2" else llama_script.read_llama(script, v)
    v.check(run.script)
    sizes = ("TP", *batch_names(script))
    if (
        not fine_tuning
        and v.values.keys() - {"DRY_RUN", "REHEARSE", "NO_TRAINING"}
        and not any(name in v.values for name in sizes)
    ):
        run.translation.remark(
            ", ".join(sizes),
            "mistake",
            "not given, so the script's defaults apply. Variables on a line of their own do not reach the script: "
            "write them before the command on the same line, end their line with a backslash, or start it with export",
        )
    for option in v.unused():
        run.translation.remark(option, "unsupported", "it has no effect with these values of the other variables")
    for name, meant in v.similar_variables(environment, table["elsewhere"]).items():
        run.translation.remark(
            name, "mistake", f"it is set in the environment, but {run.script} does not read it; did you mean {meant}?"
        )
    return run


def remark_on_full_nodes(script: str, run: ScriptRun) -> None:
    why = run.batch_size_error(NODE * run.translation.world.nnodes, batch_names(script))
    if why is not None and run.translation.world.nproc_per_node is None:
        run.translation.remark(batch_names(script)[1], "mistake", f"on nodes of {NODE} GPUs, {why}")


def batch_names(script: str) -> tuple[str, str]:
    """The variables of micro batch size and global batch size."""
    return "MBS", "BS" if script in ("llama2", "llama3") else "GBS"


def with_start_time(run: ScriptRun, now: datetime) -> ScriptRun:
    stamp = now.strftime("%Y%m%d_%H%M%S" if run.script == "train_deepseekv2.sh" else "%Y-%m-%d_%H-%M-%S")
    for name in ("log_folder", "train_log"):
        setattr(run, name, getattr(run, name).replace(TIME, stamp))
    run.translation.settings["out"] = str(run.translation.settings["out"]).replace(TIME, stamp)
    return run
