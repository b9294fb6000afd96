"""What a step does on a GPU with ``train.deterministic``, and calls that flush the allocator in any step."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_cuda.runner import FakeCuda
from fake_cuda.trace import record
from fake_cuda.world import build

DENSE: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = DENSE | {
    "model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
NOT_DETERMINISTIC = {
    *("put", "put_", "histc", "median", "kthvalue", "nll_loss_forward", "nll_loss2d_forward", "index_reduce"),
    *("scatter_reduce", "_embedding_bag", "embedding_dense_backward", "_scaled_dot_product_cudnn_attention_backward"),
}
"""Operators for CUDA without a deterministic version, by the reference of ``torch.use_deterministic_algorithms``; torch
does not raise an error for the last two."""


def deterministic_step(model: dict[str, Any], precision: str, layout: dict[str, Any]) -> dict[str, Any]:
    from isthmus.platforms.detect import detect
    from isthmus.platforms.deterministic import use_deterministic_algorithms
    from isthmus.platforms.environment import set_late

    platform = detect()
    set_late.clear()  # the device of this process has been used by other tests
    use_deterministic_algorithms(platform)
    size = max([1, *layout.values()])
    sections = {"train": {"compile": False}}  # as without a compiler, which this process always has
    rank = build(model, size=size, precision=precision, sections=sections, **layout)
    with record() as trace:
        rank.stepper.train_step([rank.batch(20, 44), rank.batch(8, 30)])
    experts = {str(m.kernels) for s in rank.model.stages for m in s.modules() if type(m).__name__ == "GroupedExperts"}
    return {"kernels": dict(trace.kernels), "experts": sorted(experts)}


@pytest.mark.thorough_cases("model1-bf16-layout1-gfx942")
@pytest.mark.parametrize(
    ("model", "precision", "layout", "gpu"),
    [
        (DENSE, "bf16", {}, "sm_90"),
        (EXPERTS, "bf16", {"ep": 2}, "gfx942"),
        (DENSE, "fp8", {"tp": 2}, "gfx950"),
    ],
)
def test_operators_of_a_deterministic_step_have_a_deterministic_version(
    fake_cuda: FakeCuda, model: dict[str, Any], precision: str, layout: dict[str, Any], gpu: str
) -> None:
    results = fake_cuda.run(deterministic_step, gpu=gpu, model=model, precision=precision, layout=layout)
    names = {name.partition(".")[0] for name in results["kernels"]}
    assert {"mm", "index_select"} & names and not NOT_DETERMINISTIC & names
    assert not any("matmul=True" in kernels or "gradient=True" in kernels for kernels in results["experts"])


def allocator_calls() -> dict[str, int]:
    rank = build(EXPERTS)
    rank.stepper.train_step([rank.batch(20, 44)])
    calls: Counter[str] = Counter()
    for name in ("empty_cache", "synchronize", "mem_get_info", "memory_stats", "memory_snapshot", "ipc_collect"):
        setattr(torch.cuda, name, lambda *_args, _name=name, **_kwargs: calls.update([_name]))
    rank.stepper.train_step([rank.batch(20, 44), rank.batch(13)])
    return dict(calls)


def test_no_step_flushes_or_queries_the_allocator(fake_cuda: FakeCuda) -> None:
    """On ROCm, memory that is returned and allocated again costs most of a step."""
    assert fake_cuda.run(allocator_calls, gpu="gfx942") == {}


def start_up(folder: str) -> dict[str, Any]:
    """The environment at the first query of the device, and the log, of a run until its ranks join."""
    from isthmus.config.schema import RunConfig
    from isthmus.platforms import gpu
    from isthmus.recipes.plan.validation import validate
    from isthmus.recipes.process_setup import prepare_process

    cuda: Any = torch.cuda
    first: list[dict[str, str]] = []
    options: list[str] = []
    cuda.is_initialized = lambda: bool(first)
    for name in ("is_available", "device_count", "get_device_properties"):
        query = getattr(cuda, name)
        setattr(cuda, name, lambda *args, query=query: (first or first.append(dict(os.environ)), query(*args))[1])
    gpu.SET_ALLOCATOR = options.append
    cuda.memory._snapshot = lambda: {"allocator_settings": {"expandable_segments": bool(options)}}
    values = {"recipe": "pretrain", "out": folder, "model": {"config": DENSE, "init": "random"}, "data": {"mock": True}}
    config = RunConfig.model_validate(values | {"train": {"steps": 1, "deterministic": True}})
    before = dict(os.environ)
    log = prepare_process(validate(config, ranks_here=1))
    ours = {name: value for name, value in os.environ.items() if before.get(name) != value}
    return {"first": first[0], "ours": ours, "log": log, "options": options}


@pytest.mark.parametrize(
    ("gpu", "some"),
    [
        ("sm_90", {"CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"}),
        ("gfx950", {"HSA_NO_SCRATCH_RECLAIM", "GPU_MAX_HW_QUEUES", "ROCBLAS_DEFAULT_ATOMICS_MODE", "NCCL_ALGO"}),
    ],
)
def test_variables_are_set_before_a_run_queries_the_device(
    fake_cuda: FakeCuda, tmp_path: Path, gpu: str, some: set[str]
) -> None:
    results = fake_cuda.run(start_up, gpu=gpu, folder=str(tmp_path / "out"))
    late = {"RCCL_WARP_SPEED_AUTO"} & results["ours"].keys()  # depends on the device, and is read for a process group
    assert some <= results["ours"].keys() and bool(late) == (gpu == "gfx950")
    assert {name: results["first"].get(name) for name in results["ours"].keys() - late} == {
        name: value for name, value in results["ours"].items() if name not in late
    }
    log = "\n".join(results["log"])
    assert "too late" not in log and all(f"{name}={value}: " in log for name, value in results["ours"].items())
    assert results["options"] == ["expandable_segments:True"] and "expandable segments on" in log
    assert "deterministic: torch uses deterministic kernels" in log
