"""The models that the GPU benchmarks train, and the programs that train them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

ISTHMUS, TORCH, TRAINER = "gpu_turns.isthmus_turn", "gpu_turns.torch_turn", "gpu_turns.trainer_turn"
CONTESTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "isthmus": (ISTHMUS, {}),
    "isthmus-again": (ISTHMUS, {}),
    "isthmus-fp8": (ISTHMUS, {"precision": "fp8"}),
    "isthmus-fp32-cpu": (ISTHMUS, {"precision": "fp32", "platform": "cpu"}),
    "transformers-compiled": (TORCH, {"model": "transformers", "compiled": True}),
    "trainer-compiled": (TRAINER, {"compiled": True}),
    "trl": (TRAINER, {"model": "trl"}),
    "plain-compiled": (TORCH, {"model": "plain", "compiled": True}),
    "plain-sac": (TORCH, {"model": "plain", "compiled": True, "recompute": True}),
    "plain-fp8": (TORCH, {"model": "plain", "compiled": True, "precision": "fp8"}),
}
"""Name -> its module, and the fields of its ``Turn``."""
_SMALL_VOCABULARY = {"vocab_size": 32768, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-1b": ("Llama 3.2 1B", "llama3.2-1b", {}),
    "qwen-0.6b": ("Qwen3 0.6B", "qwen3-0.6b", {}),
    "llama-8b": ("Llama 3.1 8B", "llama3.1-8b", {}),
    "layers-8b": ("8 layers of Llama 3.1 8B", "llama3.1-8b", {"num_hidden_layers": 8, **_SMALL_VOCABULARY}),
    "moe-16": (
        "8 layers of Qwen3 30B-A3B with 16 experts of width 1536, 4 per token", "qwen3-30b-a3b",
        {"num_hidden_layers": 8, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 1536,
         **_SMALL_VOCABULARY},
    ),
    "qwen-8m": (
        "Qwen3 with 8M parameters", "qwen3-0.6b",
        {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8192, "bos_token_id": 1, "eos_token_id": 2},
    ),
}  # fmt: skip
"""Name -> what it is, a preset of ``src/isthmus/presets/models``, and keys of config.json that differ from it.

Weights are random. A small vocabulary lets the layers dominate.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One model and its data; each contestant trains it in a process of its own."""

    model: str
    chats: bool = False
    """Whether the data are chats of different lengths instead of sequences of random tokens."""
    seq_length: int = 8192
    accumulation: int = 4
    """Micro batches per step."""
    timed_steps: int = 8
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of Isthmus."""
    needs: str = ""
    """Package that Isthmus needs for the settings."""


CASES: dict[str, Case] = {
    "llama-1b": Case(model="llama-1b"),
    "layers-8b": Case(model="layers-8b"),
    "qwen-0.6b": Case(model="qwen-0.6b"),
    "moe-16": Case(model="moe-16"),
    "chats": Case(model="qwen-0.6b", chats=True),
    "long-32k": Case(model="llama-1b", seq_length=32768, accumulation=1, settings={"train.recompute": "selective"}),
    "long-128k": Case(model="llama-1b", seq_length=131072, accumulation=1, settings={"train.recompute": "full"}),
    "adam-8bit": Case(model="llama-1b", settings={"optim.optimizer": "adamw_8bit"}, needs="bitsandbytes"),
    "qlora-8b": Case(model="llama-8b", settings={"lora.rank": 16, "lora.quantize": "nf4"}, needs="bitsandbytes"),
    "sft-200": Case(model="qwen-8m", chats=True, seq_length=512, accumulation=8, timed_steps=197),
}
DESCRIPTION = "workload.json"
"""Written last into a folder of weights or of tokens."""
TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1024, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Sizes of all models in a dry run."""
TINY_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LEARNING_RATE = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """The spec of one contestant's run."""

    weights: str
    """Hugging Face folder."""
    tokens: str
    """Folder with ``prepared`` (indexed files, for Isthmus) and ``steps.pt`` (the same micro batches, for others)."""
    platform: str
    model: str = "isthmus"
    precision: str = "bf16"
    compiled: bool = False
    recompute: bool = False
    """Selective recomputation, in the plain model."""
    chats: bool = False
    dry: bool = False
    """Tiny: emulated FP8, and torch.compile without its code generator."""
    seq_length: int = 8192
    accumulation: int = 4
    warmup_steps: int = 3
    timed_steps: int = 8
    profiled_steps: int = 2
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""

    @property
    def steps(self) -> int:
        """Steps with a recorded loss and time."""
        return self.warmup_steps + self.timed_steps

    def spec(self) -> dict[str, Any]:
        """For JSON; ``Turn(**spec)`` is the inverse."""
        return asdict(self)


class Absent(Exception):
    """This contestant cannot run here; the text has the reason."""


def model_config(model: str, *, tiny: bool) -> dict[str, Any]:
    """The keys of config.json."""
    from isthmus.config.model_file import merge_config, read_model

    _, preset, changes = MODELS[model]
    keys = merge_config(read_model(f"preset:{preset}"), changes)
    return keys if not tiny else keys | TINY | (TINY_MOE if "num_experts" in keys else {})
