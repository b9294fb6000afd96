"""The workload of the GRPO benchmark: a model with random weights, prompts, and a reward that is computed at once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORDS = "sea sky sun wind tree stone light house road river night cloud field bird fish snow".split()


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A run of one contestant."""

    model: str
    prompts: str
    answers: int
    """Of a step."""
    group_size: int
    new_tokens: int
    micro_batch_size: int
    steps: int
    """The first one is not timed."""
    platform: str = "cpu"


def reward(completions: list[Any], **_: Any) -> list[float]:
    """The share of spaces in each answer, a text or a message."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [text.count(" ") / max(1, len(text)) for text in texts]


def build(folder: Path, *, tiny: bool) -> tuple[Path, Path, int]:
    """Write model and prompts; returns their paths, and the number of parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from isthmus.hf.tiny_model import train_tokenizer
    from isthmus.hf.tokenizer.tokenizer import save_tokenizer

    torch.manual_seed(0)
    tokenizer = train_tokenizer([" ".join(WORDS)], vocab_size=512)
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 32000}
    if tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
    config = Qwen3Config(
        **sizes,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=sizes["hidden_size"] // 8,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder / "model")
    save_tokenizer(tokenizer, folder / "model")
    prompts = folder / "prompts.jsonl"
    records = [
        {"prompt": [{"role": "user", "content": " ".join(WORDS[(k + n) % len(WORDS)] for n in range(8 + k % 8))}]}
        for k in range(64)
    ]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder / "model", prompts, sum(parameter.numel() for parameter in model.parameters())
