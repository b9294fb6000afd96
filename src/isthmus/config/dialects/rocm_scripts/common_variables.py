"""What the training scripts of ROCm's Megatron-LM have in common."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from isthmus.config.dialects.script_variables import Variables
from isthmus.config.dialects.translation import Translation, World
from isthmus.config.yaml_text import Syntax, read_value

OWN = ("DRY_RUN", "NPROC", "TRAIN_LOG")
"""Variables of the scripts here: show the run and stop; ranks on this machine; the log file."""
WORLD = ("MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK")
EXPORTED = (
    *("NCCL_", "RCCL_", "GLOO_", "TORCH_", "PYTORCH_", "HSA_", "HIP_", "ROCR_", "GPU_", "NVTE_", "TE_HIPBLASLT_"),
    *("HIPBLASLT_", "OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES"),
    *("TOKENIZERS_PARALLELISM", "HF_TOKEN", "HF_HOME", "HF_ENDPOINT"),
)
"""Variables that the scripts pass on to the libraries below; an argument may set one too."""
TIME = "<time>"
"""In the names of files and folders: when the run starts, which is filled in then."""
NODE = 8
"""GPUs of the machines that the scripts are written for."""
TE_TUNING = (
    "it tunes the products of TransformerEngine, which is not used here. PYTORCH_TUNABLEOP_ENABLED=1 in the "
    "environment tunes torch's own instead, at the price of slow first steps"
)
CURRENT_SCALING = (
    "FP8 with delayed scaling (a history of 1024 maxima) is TransformerEngine's; here every matrix is scaled by its "
    "own maximum, in the same hybrid of e4m3 and e5m2"
)
NO_CACHE = "there is no index cache: made-up data needs none, and prepared files are mapped"


@dataclass(slots=True)
class ScriptRun:
    """What a script would do."""

    script: str
    """Its file name."""
    translation: Translation
    log_folder: str
    train_log: str
    """The log file, under the name that the script gives it."""
    tee: bool
    """Whether what goes into the log file is on the screen as well."""
    dry_run: bool = False
    no_training: bool = False
    """Only read the figures of a log file that is there."""
    summary_from: int = 2
    """Iterations at the beginning that the script's means leave out; the last is left out too."""
    with_throughput: bool = True
    """Whether the script's summary has the TFLOP/s."""
    exports: dict[str, str] = field(default_factory=dict)

    def setting(self, name: str, default: Any = None) -> Any:
        """A setting of the translation."""
        return self.translation.settings.get(name, default)

    def misfit(self, ranks: int, names: tuple[str, str]) -> str | None:
        """Why the global batch cannot be dealt out; None if it can, or the layout does not fit the ranks anyhow.

        Args:
            ranks: all of them.
            names: the variables of micro batch and global batch.
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
    """The ranks, from the four variables of torchrun's options, and what is likely forgotten among them."""
    nodes, rank = v.whole("NNODES", 1), v.whole("NODE_RANK", 0, least=0)
    if rank >= nodes:
        alone = "" if v.says("NNODES") else ", and NNODES is not given, so there is one node. Set NNODES on every node"
        v.refuse("NODE_RANK", f"wanted a number below NNODES={nodes}{alone}")
    elif v.says("MASTER_ADDR") and v.text("MASTER_ADDR", "") not in ("localhost", "127.0.0.1") and nodes == 1:
        translation.remark(
            v.said("MASTER_ADDR"), "mistake",
            "NNODES is not given, so this node trains alone. A run over two nodes needs NNODES=2 and NODE_RANK on each",
        )  # fmt: skip
    if nodes > 1 and not v.says("MASTER_ADDR"):
        v.refuse("NNODES", "wanted MASTER_ADDR too: the name of the first node, the same on all of them")
    if re.fullmatch(r"IP_\w+|\$.*|<.*>", v.text("MASTER_ADDR", "")):
        translation.remark(v.said("MASTER_ADDR"), "mistake", "a placeholder: put the first node's name or address here")
    chosen = v.whole("MASTER_PORT", port or 1) if port is not None or v.says("MASTER_PORT") else None
    nproc = v.whole("NPROC", 1) if v.says("NPROC") else None
    address = v.text("MASTER_ADDR", "localhost")
    return World(nnodes=nodes, node_rank=rank, nproc_per_node=nproc, master_addr=address, master_port=chosen)


def of_all_nodes(name: str, world: World) -> str:
    """A script's name for a folder, less what is another on every node: ranks of one run share one folder."""
    if world.nnodes == 1:
        return name
    return name.replace(f"_rank{world.node_rank}_", "_").replace(f"/{TIME}", "").replace(f"-{TIME}", "")


def put_data(t: Translation, v: Variables, *, default_path: str, prefix_of: str, implied: bool) -> bool:
    """Mock data, or the files; returns whether it is mock.

    Args:
        t: the translation.
        v: the variables.
        default_path: what is read when only MOCK_DATA=0 is said.
        prefix_of: the variable that ``default_path`` is from.
        implied: whether DATA_PATH alone asks for real data, as newer scripts have it.
    """
    path = v.text("DATA_PATH", "") if "DATA_PATH" in v.known else ""
    mock = v.switch("MOCK_DATA", not (implied and path))
    if mock:
        t.put("data.mock", True, v.said("MOCK_DATA", 1))
        for name in ("DATA_PATH", prefix_of) if path else (prefix_of,):
            if v.says(name):
                t.remark(v.said(name), "unsupported", "MOCK_DATA=1 asks for made-up data. Set MOCK_DATA=0 to read it")
        return True
    said = v.said("DATA_PATH") if path else v.said(prefix_of, default_path)
    if not v.says("MOCK_DATA"):
        t.remark(said, "different", "real data, as the scripts of 2026 have it; those of 2025 want MOCK_DATA=0 as well")
    words = path.split() or [default_path]
    weights, prefixes = words[::2], words[1::2]
    if len(words) > 1 and len(weights) == len(prefixes) and all(re.fullmatch(r"[0-9.]+", word) for word in weights):
        for number, (weight, prefix) in enumerate(zip(weights, prefixes, strict=True), start=1):
            t.put(f"data.sets.set{number}.files", [prefix], said)
            t.put(f"data.sets.set{number}.weight", float(weight), said)
    else:
        t.put("data.files", words, said)
    return False


def put_settings(t: Translation, v: Variables) -> None:
    """Lay settings that were given by their own names over all others."""
    for name, text in v.settings.items():
        try:
            value = read_value(text)
        except Syntax:
            value = text
        t.put(name, value, f"{name}={text}")


def put_numbers_for_tokens(t: Translation, v: Variables, vocab_size: int) -> None:
    """A tokenizer of numbers alone, for made-up data: those of the model's rows but the last, which ends documents."""
    why = "made-up data has no text"
    chosen = v.settings.get("model.config.vocab_size", "")
    t.put("tokenizer.type", "NullTokenizer", why)
    t.put("tokenizer.vocab_size", int(chosen) - 1 if re.fullmatch("[1-9][0-9]+", chosen) else vocab_size - 1, why)


def remark_on(t: Translation, v: Variables, remarks: Sequence[tuple[str, str | None, Any, str]]) -> None:
    """Say what has no setting.

    Args:
        t: the translation.
        v: the variables.
        remarks: (variable, its value or None for any, what becomes of it, why).
    """
    for name, value, became, why in remarks:
        if v.says(name) and (value is None or v.given[name] == value):
            t.remark(v.said(name), became, why)
