"""The models that the GPU benchmarks train, and the programs that train them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SEQ_LENGTH = 8192
ISTHMUS, TORCH = "gpu_turns.isthmus_turn", "gpu_turns.torch_turn"
CONTESTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "isthmus": (ISTHMUS, {}),
    "isthmus-fp8": (ISTHMUS, {"precision": "fp8"}),
    "transformers": (TORCH, {"model": "transformers"}),
    "transformers-compiled": (TORCH, {"model": "transformers", "compiled": True}),
    "transformers-flash": (TORCH, {"model": "transformers", "attention": "flash_attention_2"}),
    "plain-compiled": (TORCH, {"model": "plain", "compiled": True}),
    "plain-compiled-fp8": (TORCH, {"model": "plain", "compiled": True, "precision": "fp8"}),
    "transformers-padded": (TORCH, {"model": "transformers"}),
    "transformers-padded-compiled": (TORCH, {"model": "transformers", "compiled": True}),
}
"""Name -> its module, and the fields of its ``Turn``."""
_DENSE = tuple(name for name in CONTESTANTS if "padded" not in name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One model and its data; each contestant trains it in a process of its own."""

    about: str
    preset: str
    """A model of ``src/isthmus/presets/models``; its weights are random."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that differ from the preset."""
    contestants: tuple[str, ...] = _DENSE
    chats: bool = False
    """Whether the data are chats of different lengths instead of sequences of random tokens."""


_SMALL_VOCABULARY = {"vocab_size": 32768, "bos_token_id": 1, "eos_token_id": 2}
CASES: dict[str, Case] = {
    "llama-1b": Case(about="Llama 3.2 1B", preset="llama3.2-1b"),
    "qwen-0.6b": Case(about="Qwen3 0.6B", preset="qwen3-0.6b"),
    "layers-8b": Case(
        about="8 layers of Llama 3.1 8B, 32,768 tokens in the vocabulary",
        preset="llama3.1-8b",
        config={"num_hidden_layers": 8, **_SMALL_VOCABULARY},
    ),
    "moe-16": Case(
        about="8 layers of Qwen3 30B-A3B with 16 experts of width 1536, 4 per token, 32,768 tokens in the vocabulary",
        preset="qwen3-30b-a3b",
        config={
            "num_hidden_layers": 8, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 1536,
            **_SMALL_VOCABULARY,
        },
        contestants=("isthmus", "transformers", "transformers-compiled"),
    ),
    "chats": Case(
        about="Qwen3 0.6B on chats: packed by Isthmus, padded to the longest of a micro batch by transformers",
        preset="qwen3-0.6b",
        contestants=("isthmus", "transformers-padded", "transformers-padded-compiled"),
        chats=True,
    ),
}  # fmt: skip
DESCRIPTION = "workload.json"
"""Written last into the folder of a case."""
TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 8192, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Sizes of all models in a dry run."""
TINY_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """The spec of one contestant's run."""

    folder: str
    """Contains ``model`` (Hugging Face); for chats also ``prepared`` and ``samples`` (indexed files)."""
    platform: str
    started_s: float
    """Seconds since 1970 when the process was started, or in a dry run the turn."""
    model: str = "isthmus"
    precision: str = "bf16"
    attention: str = "sdpa"
    compiled: bool = False
    chats: bool = False
    dry: bool = False
    """Tiny: emulated FP8, and torch.compile without its code generator."""
    seq_length: int = SEQ_LENGTH
    accumulation: int = 4
    """Micro batches per step."""
    warmup_steps: int = 3
    timed_steps: int = 8
    profiled_steps: int = 2

    @property
    def model_folder(self) -> Path:
        """The Hugging Face folder."""
        return Path(self.folder) / "model"

    def spec(self) -> dict[str, Any]:
        """For JSON; ``Turn(**spec)`` is the inverse."""
        return asdict(self)


class Absent(Exception):
    """This contestant cannot run here; the text has the reason."""


def model_config(case: Case, *, tiny: bool) -> dict[str, Any]:
    """The keys of config.json."""
    from isthmus.config.model_file import merge_config, read_model

    keys = merge_config(read_model(f"preset:{case.preset}"), case.config)
    return keys if not tiny else keys | TINY | (TINY_MOE if "num_experts" in keys else {})
