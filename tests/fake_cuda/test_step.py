"""An optimizer step on a GPU: what the host waits for, and where optimizer state is allocated."""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from fake_cuda.architectures import config_of
from fake_cuda.runner import FakeCuda
from fake_cuda.trace import measure, record
from fake_cuda.world import build
from isthmus.config.schema.dpo import DpoConfig
from isthmus.config.schema.grpo import GrpoConfig, RolloutConfig
from isthmus.data.batching.packed_batch import RolloutBatch
from isthmus.engine.checkpoint.run_state import sharded_run_state
from isthmus.engine.loss.policy_loss import PolicyObjective
from isthmus.engine.loss.preference_loss import PreferenceObjective
from isthmus.train.work_time import WorkTime

QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 300,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
TWO_LAYERS = QWEN3 | {"num_hidden_layers": 2}
ONE_LAYER = QWEN3 | {"num_hidden_layers": 1}
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 300,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 10000.0, "sliding_window": None,
}  # fmt: skip


def waits_of_a_step(
    *, pairs: bool = False, grpo: dict[str, Any] | None = None, measures: bool = False, **settings: Any
) -> list[str]:
    rank = build(**settings)
    batches = [rank.batch(20, 44) for _ in range(2)]
    if pairs:
        rank.stepper.objective = PreferenceObjective(DpoConfig())
        batches = [replace(batch, reference_logps=torch.zeros(2, dtype=torch.float64)) for batch in batches]
    if grpo is not None:
        rank.stepper.objective = PolicyObjective(GrpoConfig(**grpo), RolloutConfig())
        tokens, answers = torch.zeros(64, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
        rollout = RolloutBatch(
            temperature=0.7,
            advantages=answers,
            weights=answers,
            sampling_logps=tokens,
            old_logps=tokens,
            reference_logps=tokens,
            total_tokens=128,
            total_answers=4,
        )
        batches = [replace(batch, rollout=rollout) for batch in batches]
    rank.stepper.train_step(batches)  # tries once what the GPU supports
    time = WorkTime(rank.stepper.device)
    with record() as trace, time.measured() if measures else nullcontext():
        rank.stepper.train_step(batches, lambda: [64.0, 0.0])
    assert not measures or len(time.spans) > 10, "the step, and its collectives"
    return [str(sync) for sync in trace.syncs]


def waits_of_steps(*, names: list[str]) -> dict[str, list[str]]:
    """By the name of the settings; those whose step fails have its error."""
    results = {}
    for name in names:
        try:
            results[name] = waits_of_a_step(**SETTINGS[name])
        except Exception:
            results[name] = ["the step failed", traceback.format_exc()]
    return results


SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"model": TWO_LAYERS, "precision": "fp32"},
    "fp16-tp2": {"model": ONE_LAYER, "precision": "fp16", "tp": 2, "size": 2},
    "pp2": {"model": TWO_LAYERS, "size": 2, "rank": 1, "pp": 2},
    "pp2-vpp2": {"model": QWEN3, "size": 2, "pp": 2, "vpp": 2},
    "fsdp": {"model": ONE_LAYER, "size": 2, "fsdp": True},
    "hsdp": {"model": ONE_LAYER, "size": 4, "fsdp": 2},
    "dpo": {"model": ONE_LAYER, "pairs": True},
    "dapo": {
        "model": ONE_LAYER,
        "tp": 2,
        "size": 2,
        "grpo": {"kl_weight": 0.1, "entropy_weight": 0.1, "correction": "token"},
    },
    "gspo-cp2": {"model": ONE_LAYER, "cp": 2, "size": 2, "grpo": {"loss": "gspo", "correction": "mask"}},
    "offload-dp2": {"model": ONE_LAYER, "size": 2, "sections": {"optim": {"offload": True}}},
    "moe": {"model": MIXTRAL, "sections": {"moe": {"aux_loss": 0.01}}},
    "delta nets": {"model": config_of("delta nets, gated attention")},
    "Mamba-2": {"model": config_of("one block in each layer", n_groups=1), "tp": 2, "size": 2},
    "muon": {"model": MIXTRAL, "sections": {"optim": {"optimizer": "muon"}}},
    "freeze": {"model": ONE_LAYER, "sections": {"train": {"freeze": ["model.embed_tokens.*", "*.mlp.*", "*norm*"]}}},
    "lora": {"model": MIXTRAL, "sections": {"lora": {"rank": 8}}},
    "measured-tp2": {"model": ONE_LAYER, "tp": 2, "size": 2, "measures": True},
    "neftune-tp2": {"model": ONE_LAYER, "tp": 2, "size": 2, "sections": {"train": {"neftune_alpha": 5.0}}},
}


@pytest.fixture(scope="module")
def waits(fake_cuda: FakeCuda, request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """All selected settings share a process, and so what torch learns about the operators."""
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in items if hasattr(item, "callspec")]
    return dict(fake_cuda.run(waits_of_steps, names=names))


@pytest.mark.thorough_cases(
    "fp32", "pp2", "freeze", "neftune-tp2", "Mamba-2", "dpo", "fp16-tp2", "fsdp", "hsdp", "offload-dp2"
)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_host_reads_the_gpu_once_in_a_step(name: str, waits: dict[str, list[str]]) -> None:
    """Losses, counts, gradient norm, overflow flag and expert load in one copy; nothing else waits."""
    assert len(waits[name]) == 1 and waits[name][0].startswith("to host (_to_copy) at step.py"), waits[name]


def waits_of_a_pipeline() -> dict[str, list[int]]:
    """Waits and exchanges of shapes in a step of four micro batches, by their lengths and the number of the stage."""
    exchange, counts = P2PCommunicator._communicate_shapes, {}
    received: list[int] = []
    exchanges = 0

    def exchange_shapes(*args: Any) -> Any:
        nonlocal exchanges
        exchanges += 1
        exchange(*args)  # receives zeros
        return [[received.pop(0), 1, 64] if receives else [0, 0, 0] for receives in args[3:]]

    for name, lengths in (("equal", [64] * 4), ("unequal", [64, 48, 56, 40])):
        for stage in range(2):
            rank = build(TWO_LAYERS, size=2, rank=stage, pp=2)
            batches = [rank.batch(length) for length in lengths]
            with patch.object(P2PCommunicator, "_communicate_shapes", exchange_shapes):
                for _ in range(2):  # the first step tries what the GPU supports
                    exchanges, received[:] = 0, lengths
                    with record() as trace:
                        rank.stepper.train_step(batches)
            counts[f"{name} {stage}"] = [len(trace.syncs), exchanges]
    return counts


def test_stages_exchange_no_shapes_of_equal_lengths(fake_cuda: FakeCuda) -> None:
    """A run pads the micro batches of a step to one length, because each exchange of shapes waits for the GPU."""
    counts = fake_cuda.run(waits_of_a_pipeline)
    assert counts["equal 0"] == counts["equal 1"] == [1, 0]
    for stage in range(2):
        waits, exchanges = counts[f"unequal {stage}"]
        assert exchanges > 4 and waits > exchanges


def memory_of_optimizer_state(*, offload: bool) -> dict[str, int]:
    with measure() as memory:
        rank = build(QWEN3, sections={"optim": {"offload": offload}})
        live = memory.live_bytes
        saved = sharded_run_state(rank.stepper, is_loading=False)
        assert saved["optimizer"]["param_state"]
        parameters = sum(parameter.numel() for stage in rank.model.stages for parameter in stage.parameters())
        return {"live": live, "peak": memory.peak_bytes, "parameters": parameters}


def test_optimizer_state_is_never_twice_on_the_gpu(fake_cuda: FakeCuda) -> None:
    """Neither when it is built, with and without offload, nor in the state of a checkpoint."""
    plain, offloaded = (fake_cuda.run(memory_of_optimizer_state, offload=offload) for offload in (False, True))
    parameters = plain["parameters"]
    assert plain["live"] - offloaded["live"] == 8 * parameters
    for numbers in (plain, offloaded):
        assert numbers["peak"] - numbers["live"] < parameters / 2  # bytes; the weights are loaded one by one
