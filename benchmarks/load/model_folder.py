"""Writes the model of the loading benchmark: the smallest Qwen3, with enough layers for about 1 GB."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of the Qwen3 model."""

    num_hidden_layers: int
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151936
    tie_word_embeddings: bool = True


SHAPES = {"bf16": Shape(num_hidden_layers=22), "fp32": Shape(num_hidden_layers=6)}
TINY = Shape(
    num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=1000,
)  # fmt: skip


def write_model(folder: Path, shape: Shape, precision: str) -> dict[str, Any]:
    """Write the folder with random weights, sync it and read it into the page cache."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(Qwen3Config(**asdict(shape)))
    model.to(DTYPES[precision])
    model.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    with file.open("rb", buffering=0) as pages:
        os.fsync(pages.fileno())  # otherwise writeback would slow the first run down
        while pages.read(1 << 24):
            pass
    return {"parameters": sum(p.numel() for p in model.parameters()), "file_bytes": file.stat().st_size}
