"""The loss and weight gradients on a GPU: few kernels, no synchronization, float32 sums by the GEMM."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fake_cuda.runner import FakeCuda
from fake_cuda.trace import measure, record
from fake_cuda.world import build, world

VOCAB, TOKENS = 128256, 8192
QWEN = {
    "model_type": "qwen2", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


def loss_of_a_micro_batch(tp: int = 1, softcap: float | None = None, precision: str = "bfloat16") -> dict[str, Any]:
    """Kernels, synchronizations and temporary memory of the loss with its gradients, on the last of ``tp`` ranks."""
    from megatron.core import parallel_state

    from isthmus.engine.linear import matmul
    from isthmus.engine.loss import cross_entropy_gpu
    from isthmus.engine.loss.linear_cross_entropy import VocabShard, linear_cross_entropy

    world(rank=tp - 1, size=tp, tp=tp)
    group = parallel_state.get_tensor_model_parallel_group() if tp > 1 else None
    rows, on_gpu = VOCAB // tp, {"device": "cuda", "dtype": getattr(torch, precision)}
    rounded = matmul.rounded_gradients("cuda", on_gpu["dtype"])
    regions = count_regions(cross_entropy_gpu, "row_statistics", "losses_and_gradient")
    with measure() as memory:
        hidden = torch.ones(TOKENS, 2048, requires_grad=True, **on_gpu)
        weight: Any = torch.nn.Parameter(torch.ones(rows, 2048, **on_gpu))
        weight.main_grad = torch.zeros(rows, 2048, device="cuda")
        labels = torch.zeros(TOKENS, device="cuda", dtype=torch.int64)
        before = memory.live_bytes
        memory.reset_peak()
        with record() as trace:
            loss = linear_cross_entropy(hidden, weight, labels, VocabShard((tp - 1) * rows, rows, group, softcap))
            loss.backward()
    return {
        "total": trace.num_kernels, "kernels": trace.kernels, "syncs": [str(sync) for sync in trace.syncs],
        "regions": sum(regions), "calls": len(regions), "bytes": memory.peak_bytes - before, "rounded": rounded,
    }  # fmt: skip


def distillation_of_a_micro_batch(tp: int = 1, **settings: Any) -> dict[str, Any]:
    """Like :func:`loss_of_a_micro_batch`, for section ``distill`` and a teacher of 4,096 channels."""
    from megatron.core import parallel_state

    from isthmus.config.schema.distillation import DistillConfig
    from isthmus.engine.linear import matmul
    from isthmus.engine.loss import distillation_loss
    from isthmus.engine.loss.linear_cross_entropy import TeacherOutput, VocabShard, linear_distillation

    world(rank=tp - 1, size=tp, tp=tp)
    rows = VOCAB // tp
    shard = VocabShard((tp - 1) * rows, rows, parallel_state.get_tensor_model_parallel_group() if tp > 1 else None)
    matmul.rounded_gradients("cuda", torch.bfloat16)
    regions = count_regions(distillation_loss, "row_statistics", "tail_sums", "divergence_sums", "write_gradient")
    on_gpu: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    with measure() as memory:
        hidden = torch.ones(TOKENS, 2048, requires_grad=True, **on_gpu)
        weight: Any = torch.nn.Parameter(torch.ones(rows, 2048, **on_gpu))
        weight.main_grad = torch.zeros(rows, 2048, device="cuda")
        teacher_hidden, teacher_weight = torch.ones(TOKENS, 4096, **on_gpu), torch.ones(rows, 4096, **on_gpu)
        labels = torch.zeros(TOKENS, device="cuda", dtype=torch.int64)
        teacher = TeacherOutput(teacher_hidden, teacher_weight, shard, DistillConfig(**settings))
        before = memory.live_bytes
        memory.reset_peak()
        with record() as trace:
            linear_distillation(hidden, weight, labels, shard, teacher=teacher)[0].backward()
    return {
        "kernels": trace.kernels, "syncs": [str(sync) for sync in trace.syncs], "regions": sum(regions),
        "total": trace.num_kernels, "bytes": memory.peak_bytes - before,
    }  # fmt: skip


def count_regions(module: Any, *names: str) -> list[int]:
    """Kernels of each later call of these functions, which a GPU compiles."""
    outcomes: list[int] = []
    for name in names:
        plain = getattr(module, name)

        def counted(*args: Any, plain: Any = plain) -> Any:
            with record() as trace:
                results = plain(*args)
            outcomes.append(trace.num_kernels)
            return results

        setattr(module, name, counted)
    return outcomes


@pytest.mark.parametrize("gpu", ["sm_90", "gfx942"])
def test_kernels_and_memory_of_the_loss(fake_cuda: FakeCuda, gpu: str) -> None:
    """Blocks that suit the cache of a CPU were 8,961 kernels."""
    results = fake_cuda.run(loss_of_a_micro_batch, gpu=gpu)
    assert results["rounded"] is None and not results["syncs"], results
    assert results["kernels"]["addmm"] == 4 and results["kernels"]["mm"] == 8  # chunks
    assert results["calls"] == 8 and results["total"] - results["regions"] <= 36
    assert results["total"] <= 220  # not compiled
    grad_hidden = 2 * 2 * TOKENS * 2048
    assert results["bytes"] <= (2 + 8) * TOKENS * VOCAB // 4 + grad_hidden + 2**24


def test_kernels_of_other_losses(fake_cuda: FakeCuda) -> None:
    capped = fake_cuda.run(loss_of_a_micro_batch, softcap=30.0)
    assert capped["kernels"]["addmm"] == 4 and capped["total"] - capped["regions"] <= 36
    assert capped["bytes"] <= (2 + 16) * TOKENS * VOCAB // 4 + 2**27
    sharded = fake_cuda.run(loss_of_a_micro_batch, tp=8)
    assert sharded["kernels"]["addmm"] == 1 and sharded["total"] - sharded["regions"] <= 18
    assert not capped["syncs"] + sharded["syncs"]
    exact = fake_cuda.run(loss_of_a_micro_batch, tp=8, precision="float32")
    assert exact["rounded"] is None and exact["kernels"]["addmm_"] == 1


def test_distillation(fake_cuda: FakeCuda) -> None:
    """Without synchronization; kernels that are not compiled take the memory that the estimate of a run assumes."""
    from isthmus.engine.loss.cross_entropy_gpu import CHUNK_ELEMENTS
    from isthmus.engine.loss.distillation_loss import CHUNK_SHARE, TEMPORARY_BYTES

    grad_hidden = 2 * 2 * TOKENS * 2048
    results = fake_cuda.run(distillation_of_a_micro_batch, beta=0.5, temperature=2.0, top_k=64, sft_weight=0.5)
    chunks = -(-TOKENS * VOCAB * CHUNK_SHARE // CHUNK_ELEMENTS)
    assert not results["syncs"] and results["kernels"]["addmm"] == chunks, results
    used = (results["bytes"] - grad_hidden) / (TOKENS * VOCAB / chunks)
    assert used <= 2 + 2 + TEMPORARY_BYTES
    sharded = fake_cuda.run(distillation_of_a_micro_batch, tp=8, beta=0.0)
    assert not sharded["syncs"] and sharded["total"] - sharded["regions"] <= 45 * sharded["kernels"]["addmm"]


def kernels_of_a_step(**parallel: int | bool) -> dict[str, Any]:
    rank = build(QWEN, rank=0, size=int(parallel.get("tp", 1)), **parallel)
    with record() as trace:
        rank.stepper.train_step([rank.batch(20, 44), rank.batch(60, 4)])
    return {
        "kernels": trace.kernels,
        "messages": rank.model.messages,
        "syncs": trace.syncs_in("linear.py", "matmul.py"),
    }


@pytest.mark.thorough_cases("{}", "{'tp': 2, 'async_tp': True}")
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"tp": 2, "async_tp": True}], ids=str)
def test_weight_gradients_are_summed_by_the_gemm(fake_cuda: FakeCuda, layout: dict[str, Any]) -> None:
    """Of four projections of two layers, with biases, and the output layer, for two micro batches."""
    results = fake_cuda.run(kernels_of_a_step, **layout)
    assert results["kernels"]["addmm"] == 2 * (2 * 4 + 1)
    assert not results["syncs"] and not any("weight gradients" in line for line in results["messages"])
    assert ("async tensor parallelism: on" in results["messages"]) == ("async_tp" in layout)
