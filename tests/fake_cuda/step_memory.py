"""A task that measures the memory of a step of any rank, for the test of the estimate and its benchmark."""

from __future__ import annotations

from typing import Any

from fake_cuda.trace import measure, record
from fake_cuda.world import build

RANKS: dict[str, dict[str, Any]] = {
    "8B, first stage": {"model": "llama3.1-8b", "tp": 8, "pp": 16, "rank": 0},
    "8B, cp": {"model": "llama3.1-8b", "tp": 2, "cp": 8, "pp": 8, "rank": 100},
    "8B, virtual stages": {"model": "llama3.1-8b", "tp": 8, "pp": 4, "vpp": 2, "rank": 0, "micro_batches": 4},
    "8B, fp8": {"model": "llama3.1-8b", "pp": 16, "rank": 600, "precision": "fp8"},
    "70B, a middle stage": {"model": "llama3.1-70b", "tp": 8, "pp": 16, "rank": 517, "gpu": "gfx942"},
    "70B, last stage": {"model": "llama3.1-70b", "tp": 8, "pp": 16, "rank": 1023},
    "70B, recomputed": {"model": "llama3.1-70b", "tp": 8, "pp": 16, "rank": 1000, "train": {"recompute": "full"}},
    "experts": {"model": "qwen3-30b-a3b", "pp": 16, "ep": 8, "rank": 500, "gpu": "gfx950"},
    "experts, etp": {"model": "mixtral-8x7b", "tp": 4, "pp": 8, "ep": 8, "etp": 1, "rank": 1023},
    "MLA": {"model": "deepseek-v2-lite", "pp": 9, "ep": 8, "rank": 3, "size": 1008},
    "keys as values": {"model": "gemma4-31b", "tp": 4, "pp": 10, "rank": 450, "size": 1000},
    "norms of experts": {"model": "gemma4-26b-a4b", "pp": 5, "ep": 8, "rank": 450, "size": 1000},
    "shared keys, layer inputs": {"model": "gemma4-e4b", "tp": 2, "rank": 5, "size": 8},
    "fsdp": {"model": "llama3.2-1b", "fsdp": True, "rank": 5, "size": 8, "layers": 4},
    "hsdp": {"model": "llama3.1-8b", "fsdp": 4, "rank": 5, "size": 8, "layers": 2},
}
"""Two micro batches are enough: a step of more has more in flight, but not more kinds of memory."""


def memory(
    model: str, rank: int, size: int = 1024, train: dict[str, Any] | None = None, micro_batches: int = 2,
    precision: str = "bf16", seq_length: int = 4096, layers: int | None = None,
    sections: dict[str, Any] | None = None, **parallel: Any,
) -> dict[str, Any]:  # fmt: skip
    """Bytes of the trace and of the estimate of this rank."""
    from isthmus.config.schema import ParallelConfig
    from isthmus.recipes.plan.memory_estimate import estimate_ranks

    dp = ParallelConfig(**parallel).dp(size)
    samples = (train or {}).get("micro_batch_size", 1)
    settings: dict[str, Any] = {
        "data": {"seq_length": seq_length},
        "train": {"global_batch_size": dp * micro_batches * samples, **(train or {})},
        **(sections or {}),
    }
    if layers is not None:
        settings["model"] = {"config": {"num_hidden_layers": layers}}
    with measure() as traced:
        built = build(f"preset:{model}", rank=rank, size=size, precision=precision, sections=settings, **parallel)
        persistent = traced.live_bytes
        for _ in range(2 if parallel.get("fsdp") else 1):  # FSDP's optimizer makes its state in the first step
            traced.reset_peak()
            built.stepper.train_step([built.batch(*[seq_length] * samples)] * micro_batches)
    stage = rank * built.config.parallel.pp // size
    result = estimate_ranks(built.model.plan, built.config, precision, gpu_bytes=80 << 30)[stage]
    return {
        "persistent": persistent, "peak": traced.peak_bytes, "text": str(result),
        "estimate": {"persistent": result.persistent, "total": result.total},
    }  # fmt: skip


def memory_without_state(**settings: Any) -> dict[str, Any]:
    """Live bytes around and within ``StateOffload.on_host``, peaks of a step before and after, and the estimate."""
    from isthmus.config.schema.grpo import RolloutConfig
    from isthmus.engine.optim.state_offload import StateOffload
    from isthmus.recipes.plan.memory_estimate import estimate_ranks

    grpo = {"recipe": "grpo", "rollout": RolloutConfig(reward=("exact_match",), max_new_tokens=8, offload=True)}
    sections = settings.pop("sections", {})
    with measure() as traced:
        built = build(_SMALL, sections=sections, **settings)
        stepper, batches = built.stepper, [built.batch(64)]
        state = StateOffload(stepper.model, stepper.optimizer)
        peaks, live = [], []
        for _ in range(2):
            stepper.train_step(batches)
            stepper.optimizer.zero_grad()
            traced.reset_peak()
            stepper.train_step(batches)
            peaks.append(traced.peak_bytes)
            stepper.optimizer.zero_grad()
            live.append(traced.live_bytes)
            with record() as trace, state.on_host():
                live.append(traced.live_bytes)
    config = built.config.model_copy(update=grpo)
    (estimate,) = estimate_ranks(built.model.plan, config, "bf16", gpu_bytes=80 << 30)
    return {
        "before": live[0], "within": live[1], "after": live[2], "peak_before": peaks[0], "peak_after": peaks[1],
        "syncs": [str(sync) for sync in trace.syncs], "estimate": estimate.generation - estimate.states,
        "text": str(estimate),
    }  # fmt: skip


_SMALL: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 4096,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
"""Copies to the host have real memory."""
