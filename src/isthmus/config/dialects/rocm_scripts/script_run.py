"""The run of a ROCm Megatron-LM training script, the variables that all scripts have, and the summary of a log."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from isthmus.config.dialects.megatron.data_args import weighted_paths
from isthmus.config.dialects.script_variables import Variables
from isthmus.config.dialects.translation import Translation, World
from isthmus.config.yaml_text import Syntax, read_value

TABLES: Mapping[str, Any] = read_value(Path(__file__).with_name("scripts.yaml").read_text(encoding="utf-8"))
TIME = "<time>"
"""Placeholder for the start time in file and folder names."""
NODE = 8
"""GPUs per node that the scripts expect."""
CURRENT_SCALING = (
    "delayed scaling (a history of 1024 amax values) is TransformerEngine's; Isthmus uses current scaling per tensor, "
    "with the same hybrid of e4m3 and e5m2"
)
_MEANS = {
    "throughput per GPU": r"throughput per GPU \(TFLOP/s/GPU\): ([0-9.]+)",
    "elapsed time per iteration": r"elapsed time per iteration \(ms\): ([0-9.]+)",
    "mem usages": r"mem usages: ([0-9.]+)",
}


@dataclass(slots=True)
class ScriptRun:
    script: str
    translation: Translation
    log_folder: str
    train_log: str
    tee: bool
    dry_run: bool = False
    rehearse: bool = False
    """Train a small model on CPUs."""
    no_training: bool = False
    """Only summarize an existing log file."""
    summary_from: int = 2
    """Number of first iterations that the means exclude; they exclude the last one too."""
    with_throughput: bool = True
    exports: dict[str, str] = field(default_factory=dict)

    def setting(self, name: str, default: Any = None) -> Any:
        return self.translation.settings.get(name, default)

    def batch_size_error(self, ranks: int, names: tuple[str, str]) -> str | None:
        """Why the ranks do not divide the global batch; None if they do, or if the layout is invalid or does not fit.

        ``names``: variables of micro batch size and global batch size.
        """
        layout = [self.setting(f"parallel.{name}", 1) for name in ("tp", "pp", "cp")]
        mbs, bs = self.setting("train.micro_batch_size"), self.setting("train.global_batch_size")
        if any(type(size) is not int or size < 1 for size in (*layout, mbs, bs)):
            return None  # an error of the config
        dp, remainder = divmod(ranks, math.prod(layout))
        if remainder or bs % (mbs * dp) == 0:
            return None
        below = bs // (mbs * dp) * mbs * dp
        sizes = " or ".join(f"{names[1]}={size}" for size in (below, below + mbs * dp) if size)
        fitting = [size for size in range(1, bs // dp + 1) if bs % (size * dp) == 0]
        near = sorted(fitting, key=lambda size: abs(size - mbs))[:2]
        micro = f", or {' or '.join(f'{names[0]}={size}' for size in sorted(near))}" if near else ""
        return (
            f"{names[1]}={bs} is not a multiple of {names[0]}={mbs} x {dp} data-parallel ranks = {mbs * dp} "
            f"({ranks} ranks in all). Use {sizes}{micro}"
        )


def script_run(script: str, t: Translation, v: Variables, log_folder: str, log: str, **more: Any) -> ScriptRun:
    """The run with the switches that all scripts have; ``log`` is the log file of rank 0."""
    put_settings(t, v)
    return ScriptRun(
        script,
        t,
        log_folder,
        log_of_node(log, v, t.world),
        tee=v.switch("TEE_OUTPUT", True),
        dry_run=v.switch("DRY_RUN", False),
        rehearse=v.switch("REHEARSE", False),
        exports=v.exports,
        **more,
    )


def read_world(v: Variables, port: int | None, translation: Translation) -> World:
    """The ranks, from the variables of torchrun's options; adds remarks on likely mistakes."""
    nodes, rank = v.integer("NNODES", 1), v.integer("NODE_RANK", 0, least=0)
    if rank >= nodes:
        alone = "" if v.has("NNODES") else ", and NNODES is not given (1). Set NNODES on every node"
        v.refuse("NODE_RANK", f"must be less than NNODES={nodes}{alone}")
    elif v.has("MASTER_ADDR") and v.text("MASTER_ADDR", "") not in ("localhost", "127.0.0.1") and nodes == 1:
        translation.remark(
            v.origin("MASTER_ADDR"),
            "mistake",
            "NNODES is not given, so this node trains alone. A run over two nodes needs NNODES=2 and NODE_RANK on each",
        )
    if nodes > 1 and not v.has("MASTER_ADDR"):
        v.refuse("NNODES", "needs MASTER_ADDR, the address of the first node, on every node")
    if re.fullmatch(r"IP_\w+|\$.*|<.*>", v.text("MASTER_ADDR", "")):
        translation.remark(
            v.origin("MASTER_ADDR"), "mistake", "a placeholder: replace it by the address of the first node"
        )
    chosen = v.integer("MASTER_PORT", port or 1) if port is not None or v.has("MASTER_PORT") else None
    nproc = v.integer("NPROC", 1) if v.has("NPROC") else None
    address = v.text("MASTER_ADDR", "localhost")
    return World(nnodes=nodes, node_rank=rank, nproc_per_node=nproc, master_addr=address, master_port=chosen)


def log_of_node(path: str, v: Variables, world: World) -> str:
    """The log file of this node, by default ``path``; nodes may share ``LOG_DIR``, and each writes its own log."""
    if world.node_rank == 0 or f"_rank{world.node_rank}_" in path:
        return v.text("TRAIN_LOG", path)
    return v.text("TRAIN_LOG", f"{path.removesuffix('.log')}_rank{world.node_rank}.log")


def name_of_all_nodes(name: str, world: World) -> str:
    """Remove the parts that differ by node: the ranks of a run share one folder."""
    if world.nnodes == 1:
        return name
    return name.replace(f"_rank{world.node_rank}_", "_").replace(f"/{TIME}", "").replace(f"-{TIME}", "")


def put_data(t: Translation, v: Variables, *, default_path: str, prefix_of: str, implied: bool) -> bool:
    """Translate mock data or data files; returns whether it is mock data.

    ``default_path`` is read with MOCK_DATA=0 and without DATA_PATH; ``prefix_of`` is its variable. With ``implied``
    DATA_PATH alone selects real data, as in newer scripts.
    """
    path = v.text("DATA_PATH", "") if "DATA_PATH" in v.known else ""
    mock = v.switch("MOCK_DATA", not (implied and path))
    if mock:
        t.put("data.mock", True, v.origin("MOCK_DATA", 1))
        for name in ("DATA_PATH", prefix_of) if path else (prefix_of,):
            if v.has(name):
                t.remark(v.origin(name), "unsupported", "MOCK_DATA=1 selects mock data. Set MOCK_DATA=0 to read it")
        return True
    option = v.origin("DATA_PATH") if path else v.origin(prefix_of, default_path)
    if not v.has("MOCK_DATA"):
        t.remark(option, "different", "real data, as in the scripts of 2026; those of 2025 also need MOCK_DATA=0")
    words = path.split() or [default_path]
    pairs = weighted_paths(words)
    if len(pairs) < len(words):
        for number, (weight, prefix) in enumerate(pairs, start=1):
            t.put(f"data.sets.set{number}.files", [prefix], option)
            t.put(f"data.sets.set{number}.weight", weight, option)
    else:
        t.put("data.files", words, option)
    return False


def put_settings(t: Translation, v: Variables) -> None:
    """Apply the given settings of the config, which win over translated ones."""
    for name, text in v.settings.items():
        try:
            value = read_value(text)
        except Syntax:
            value = text
        t.put(name, value, f"{name}={text}")


def put_null_tokenizer(t: Translation, v: Variables, vocab_size: int) -> None:
    """Tokenizer of mock data; the last row of the embedding is the end-of-document token."""
    why = "mock data has no text"
    chosen = v.settings.get("model.config.vocab_size", "")
    t.put("tokenizer.type", "NullTokenizer", why)
    t.put("tokenizer.vocab_size", int(chosen) - 1 if re.fullmatch("[1-9][0-9]+", chosen) else vocab_size - 1, why)


def put_integers(t: Translation, v: Variables, *settings: tuple[str, str, int]) -> None:
    """``settings``: (setting, variable, default)."""
    for setting, name, default in settings:
        t.put(setting, v.integer(name, default), v.origin(name, default))


def add_remarks(t: Translation, v: Variables, scripts: str) -> None:
    if v.has("GEMM_TUNING") and v.switch("GEMM_TUNING", False):
        t.put("train.gemm_tuning", True, v.origin("GEMM_TUNING"))
    for remark in TABLES[scripts]["remarks"]:
        name = remark["variable"]
        if v.has(name) and v.values[name] == remark.get("value", v.values[name]):
            t.remark(v.origin(name), remark["status"], remark["reason"])


def summary(log: str, *, tokens_per_step: int, ranks: int, skip: int = 2, with_throughput: bool = True) -> list[str]:
    """One line per mean over the iterations, without the first ``skip`` and the last; over all if the run is too short.

    ROCm's validation suite and dashboards read these lines. ``tokens_per_step`` counts all ranks, ``ranks`` all nodes.
    """
    iterations = [line for line in log.splitlines() if re.search(r"\biteration +\d+/ *\d+ \|", line)]
    counted = iterations[skip:-1] or iterations
    means: dict[str, float] = {}
    for name, pattern in _MEANS.items():
        values = [float(match.group(1)) for line in counted if (match := re.search(pattern, line))]
        if values:
            means[name] = fmean(values)
    if "elapsed time per iteration" not in means:
        return []
    elapsed_ms = means["elapsed time per iteration"]
    lines = [f"means over {len(counted)} of {len(iterations)} iterations:"]
    if with_throughput and "throughput per GPU" in means:
        lines.append(f"throughput per GPU: {means['throughput per GPU']}")
    lines += [
        f"elapsed time per iteration: {elapsed_ms}",
        f"tokens/GPU/s: {tokens_per_step * 1000 / (elapsed_ms * ranks):.6f}",
    ]
    if "mem usages" in means:
        lines.append(f"mem usages: {means['mem usages']}")
    return lines
