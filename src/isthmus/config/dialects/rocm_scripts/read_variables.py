"""The variables of ROCm Megatron-LM's training scripts, in the settings of a run here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from isthmus.config.dialects.rocm_scripts import deepseek_script, llama_script
from isthmus.config.dialects.rocm_scripts.common_variables import EXPORTED, NODE, TIME, ScriptRun
from isthmus.config.dialects.script_variables import Variables

SCRIPTS = ("llama2", "llama3", "deepseek_v2")


def read_script(script: str, environment: Mapping[str, str], arguments: Sequence[str] = ()) -> ScriptRun:
    """What ``train_<script>.sh`` would do.

    Args:
        script: one of ``SCRIPTS``.
        environment: its variables that are there count; all others are left alone.
        arguments: ``NAME=VALUE``, which win: a variable of the script, a setting of a config file under its dotted
            name, or a variable of the libraries below such as ``NCCL_IB_HCA``.

    Returns:
        The run, with a remark on everything that is done otherwise or not at all.

    Raises:
        UsageError: all that is wrong: an argument that nothing reads, a value that cannot be, what cannot be honoured.
    """
    of = deepseek_script if script == "deepseek_v2" else llama_script
    v = Variables(of.VARIABLES, environment, arguments, exported=EXPORTED)
    run = deepseek_script.read_deepseek(v) if script == "deepseek_v2" else llama_script.read_llama(script, v)
    v.check(run.script)
    for said in v.unasked():
        run.translation.remark(said, "unsupported", "with the other variables as they are, nothing reads it")
    for name, meant in v.near_misses(environment, of.ELSEWHERE).items():
        run.translation.remark(
            name, "mistake", f"the environment has it, and {run.script} does not read it; did you mean {meant}?"
        )
    return run


def remark_on_full_nodes(script: str, run: ScriptRun) -> None:
    """Say where a global batch cannot be dealt out over the nodes that the scripts are written for."""
    why = run.misfit(NODE * run.translation.world.nnodes, batch_names(script))
    if why is not None and run.translation.world.nproc_per_node is None:
        run.translation.remark(batch_names(script)[1], "mistake", f"on nodes of {NODE} GPUs, {why}")


def batch_names(script: str) -> tuple[str, str]:
    """What a script calls its micro batch and its global batch."""
    return "MBS", "GBS" if script == "deepseek_v2" else "BS"


def started(run: ScriptRun, now: datetime) -> ScriptRun:
    """The same run with the time in the names of its folders."""
    stamp = now.strftime("%Y%m%d_%H%M%S" if run.script == "train_deepseekv2.sh" else "%Y-%m-%d_%H-%M-%S")
    for name in ("log_folder", "train_log"):
        setattr(run, name, getattr(run, name).replace(TIME, stamp))
    run.translation.settings["out"] = str(run.translation.settings["out"]).replace(TIME, stamp)
    return run
