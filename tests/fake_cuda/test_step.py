"""An optimizer step on a GPU: what the host waits for, and where optimizer state is allocated."""

from __future__ import annotations

from typing import Any

import pytest

from fake_cuda.runner import FakeCuda
from fake_cuda.trace import measure, record
from fake_cuda.world import build

QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 300,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 300,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 10000.0, "sliding_window": None,
}  # fmt: skip


def waits_of_a_step(**settings: Any) -> list[str]:
    rank = build(**settings)
    batches = [rank.batch(20, 44) for _ in range(4)]
    rank.stepper.train_step(batches)
    with record() as trace:
        rank.stepper.train_step(batches)
    return [str(sync) for sync in trace.syncs]


@pytest.mark.parametrize(
    "settings",
    [
        {"model": QWEN3, "precision": "fp32"},
        {"model": QWEN3},
        {"model": QWEN3, "precision": "fp16"},
        {"model": QWEN3, "size": 2, "tp": 2},
        {"model": QWEN3, "size": 2, "rank": 1, "pp": 2},
        {"model": QWEN3, "size": 2, "rank": 0, "pp": 2, "vpp": 2},
        {"model": QWEN3, "size": 2, "fsdp": True},
        {"model": MIXTRAL},
    ],
)
def test_a_step(settings: Any, fake_cuda: FakeCuda) -> None:
    found = fake_cuda.run(waits_of_a_step, **settings)
    print(settings)
    print("\n".join(found))
