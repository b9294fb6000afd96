"""The run of a ROCm Megatron-LM training script, and the variables that all scripts have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from isthmus.config.dialects.script_variables import Variables
from isthmus.config.dialects.translation import Translation, World
from isthmus.config.yaml_text import Syntax, read_value

OWN = ("DRY_RUN", "NPROC", "TRAIN_LOG")
"""Variables of the scripts in examples/: print the run and exit, ranks on this machine, the log file."""
WORLD = ("MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK")
EXPORTED = (
    *("NCCL_", "RCCL_", "GLOO_", "TORCH_", "PYTORCH_", "HSA_", "HIP_", "ROCR_", "GPU_", "NVTE_", "TE_HIPBLASLT_"),
    *("HIPBLASLT_", "OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES"),
    *("TOKENIZERS_PARALLELISM", "HF_TOKEN", "HF_HOME", "HF_ENDPOINT"),
)
"""Variables for libraries, which arguments can set too; a name that ends in _ is a prefix."""
TIME = "<time>"
"""Placeholder for the start time in file and folder names."""
NODE = 8
"""GPUs per node that the scripts expect."""
TE_TUNING = (
    "it tunes the GEMMs of TransformerEngine, which Isthmus does not use. PYTORCH_TUNABLEOP_ENABLED=1 in the "
    "environment tunes those of PyTorch, with slow first steps"
)
CURRENT_SCALING = (
    "delayed scaling (a history of 1024 amax values) is TransformerEngine's; Isthmus uses current scaling per tensor, "
    "with the same hybrid of e4m3 and e5m2"
)
NO_CACHE = "Isthmus has no index cache; prepared files are memory-mapped"


@dataclass(slots=True)
class ScriptRun:
    script: str
    translation: Translation
    log_folder: str
    train_log: str
    tee: bool
    dry_run: bool = False
    no_training: bool = False
    """Only summarize an existing log file."""
    summary_from: int = 2
    """Number of first iterations that the means exclude; they exclude the last one too."""
    with_throughput: bool = True
    exports: dict[str, str] = field(default_factory=dict)

    def setting(self, name: str, default: Any = None) -> Any:
        return self.translation.settings.get(name, default)

    def misfit(self, ranks: int, names: tuple[str, str]) -> str | None:
        """Why the ranks do not divide the global batch; None if they do, or if the layout does not fit the ranks.

        ``names``: variables of micro batch size and global batch size.
        """
        model_ranks = self.setting("parallel.tp", 1) * self.setting("parallel.pp", 1) * self.setting("parallel.cp", 1)
        if ranks % model_ranks:
            return None
        mbs, bs, dp = (
            self.setting("train.micro_batch_size"),
            self.setting("train.global_batch_size"),
            ranks // model_ranks,
        )
        if bs % (mbs * dp) == 0:
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


def read_world(v: Variables, port: int | None, translation: Translation) -> World:
    """The ranks, from the variables of torchrun's options; adds remarks on likely mistakes."""
    nodes, rank = v.whole("NNODES", 1), v.whole("NODE_RANK", 0, least=0)
    if rank >= nodes:
        alone = "" if v.is_given("NNODES") else ", and NNODES is not given (1). Set NNODES on every node"
        v.refuse("NODE_RANK", f"must be less than NNODES={nodes}{alone}")
    elif v.is_given("MASTER_ADDR") and v.text("MASTER_ADDR", "") not in ("localhost", "127.0.0.1") and nodes == 1:
        translation.remark(
            v.origin("MASTER_ADDR"), "mistake",
            "NNODES is not given, so this node trains alone. A run over two nodes needs NNODES=2 and NODE_RANK on each",
        )  # fmt: skip
    if nodes > 1 and not v.is_given("MASTER_ADDR"):
        v.refuse("NNODES", "needs MASTER_ADDR, the address of the first node, on every node")
    if re.fullmatch(r"IP_\w+|\$.*|<.*>", v.text("MASTER_ADDR", "")):
        translation.remark(
            v.origin("MASTER_ADDR"), "mistake", "a placeholder: replace it by the address of the first node"
        )
    chosen = v.whole("MASTER_PORT", port or 1) if port is not None or v.is_given("MASTER_PORT") else None
    nproc = v.whole("NPROC", 1) if v.is_given("NPROC") else None
    address = v.text("MASTER_ADDR", "localhost")
    return World(nnodes=nodes, node_rank=rank, nproc_per_node=nproc, master_addr=address, master_port=chosen)


def of_all_nodes(name: str, world: World) -> str:
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
            if v.is_given(name):
                t.remark(v.origin(name), "unsupported", "MOCK_DATA=1 selects mock data. Set MOCK_DATA=0 to read it")
        return True
    option = v.origin("DATA_PATH") if path else v.origin(prefix_of, default_path)
    if not v.is_given("MOCK_DATA"):
        t.remark(option, "different", "real data, as in the scripts of 2026; those of 2025 also need MOCK_DATA=0")
    words = path.split() or [default_path]
    weights, prefixes = words[::2], words[1::2]
    if len(words) > 1 and len(weights) == len(prefixes) and all(re.fullmatch(r"[0-9.]+", word) for word in weights):
        for number, (weight, prefix) in enumerate(zip(weights, prefixes, strict=True), start=1):
            t.put(f"data.sets.set{number}.files", [prefix], option)
            t.put(f"data.sets.set{number}.weight", float(weight), option)
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
    """For mock data; the last row of the embedding is the end-of-document token."""
    why = "mock data has no text"
    chosen = v.settings.get("model.config.vocab_size", "")
    t.put("tokenizer.type", "NullTokenizer", why)
    t.put("tokenizer.vocab_size", int(chosen) - 1 if re.fullmatch("[1-9][0-9]+", chosen) else vocab_size - 1, why)


def remark_on(t: Translation, v: Variables, remarks: Sequence[tuple[str, str | None, Any, str]]) -> None:
    """``remarks``: (variable, its value or None for any, status, reason)."""
    for name, value, status, why in remarks:
        if v.is_given(name) and (value is None or v.given[name] == value):
            t.remark(v.origin(name), status, why)
