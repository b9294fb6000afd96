"""A small GPT-2 BPE as the two files that Megatron-LM reads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from isthmus.hf.tiny_model import train_tokenizer

END = "<|endoftext|>"


def write_gpt2_files(folder: Path, texts: Iterable[str], *, vocab_size: int = 300, prefix: str = "") -> Path:
    """Write ``vocab.json`` and ``merges.txt``, with ``prefix`` before their names; returns the folder."""
    inner = train_tokenizer(texts, vocab_size=vocab_size, special_tokens=(END,), eos_token=END, pad_token=END)
    model = json.loads(inner.backend_tokenizer.to_str())["model"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{prefix}vocab.json").write_text(json.dumps(model["vocab"]))
    merges = ["#version: 0.2", *map(" ".join, model["merges"])]
    (folder / f"{prefix}merges.txt").write_text("\n".join(merges) + "\n")
    return folder
