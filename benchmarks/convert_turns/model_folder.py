"""Writes the models of the conversion benchmark: Qwen3 with random weights, without building a model."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from isthmus.families.registry import family_for
from isthmus.hf.tensors.parallel_writer import SafetensorsPlan, SafetensorsWriter

_POOL_ELEMENTS = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of the Qwen3 model."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int = 151936
    tie_word_embeddings: bool = False


SHAPES = {
    "1.5gb": Shape(
        num_hidden_layers=28, hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128,
    ),
    "6gb": Shape(
        num_hidden_layers=25, hidden_size=2560, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128,
    ),
    "20000-tensors": Shape(
        num_hidden_layers=1818, hidden_size=16, intermediate_size=32, num_attention_heads=8, num_key_value_heads=8,
        head_dim=4, vocab_size=1024,
    ),
}  # fmt: skip
"""Two realistic models, and one with tensors of 1 KiB, which shows the cost per tensor."""
TINY = {
    name: Shape(
        num_hidden_layers=layers, hidden_size=64, intermediate_size=128, num_attention_heads=8, num_key_value_heads=8,
        head_dim=16, vocab_size=vocab,
    )
    for name, layers, vocab in (("1.5gb", 2, 1024), ("6gb", 2, 4096), ("20000-tensors", 20, 64))
}  # fmt: skip
"""Small versions for ``--quick``."""


def write_model(folder: Path, shape: Shape) -> dict[str, Any]:
    """Write the folder in bfloat16, in files of at most 5 GB, and sync it.

    Returns:
        The number of tensors, their bytes, and the bytes of all files.
    """
    config = {"model_type": "qwen3", "max_position_embeddings": 4096} | asdict(shape)
    family = family_for(config)
    arch = family.to_architecture(config)
    folder.mkdir(parents=True)
    text = json.dumps(family.to_hf_config(arch, dtype="bfloat16"), indent=2)
    (folder / "config.json").write_text(text, encoding="utf-8")
    shapes = family.hf_shapes(arch)
    plan = SafetensorsPlan((name, torch.bfloat16, size) for name, size in shapes.items())
    plan.create(folder)
    # Drawn once and reused from another offset for each chunk, since drawing takes seconds.
    pool = torch.empty(_POOL_ELEMENTS).normal_(std=0.02, generator=torch.Generator().manual_seed(0)).bfloat16()
    with SafetensorsWriter(plan, folder) as writer:
        at = 0
        for name, (rows, *tail) in shapes.items():
            width = torch.Size(tail).numel()
            step = max(1, _POOL_ELEMENTS // 2 // width)
            for start in range(0, rows, step):
                stop = min(rows, start + step)
                size = (stop - start) * width
                at = at if at + size <= _POOL_ELEMENTS else (at + 1) % 997
                writer.write(name, (slice(start, stop),), pool[at : at + size].view(stop - start, *tail))
                at += size
    os.sync()
    return {
        "tensors": len(shapes),
        "tensor_bytes": plan.total_bytes,
        "file_bytes": sum(path.stat().st_size for path in folder.iterdir()),
    }
