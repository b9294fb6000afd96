"""Attention on a GPU: the kernel of each model, and what a step with many samples starts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from fake_cuda.runner import FakeCuda
from fake_cuda.trace import record
from fake_cuda.world import build

TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "rms_norm_eps": 1e-6}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", **TINY, **HEADS, **ROPE},
    "mistral": {"model_type": "mistral", **TINY, **HEADS, **ROPE, "sliding_window": 16},
    "gemma2": {
        "model_type": "gemma2", **TINY, **HEADS, **ROPE, "sliding_window": 16, "attn_logit_softcapping": 50.0,
        "query_pre_attn_scalar": 32, "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2", **TINY, **HEADS, **ROPE, "num_key_value_heads": 4, "kv_lora_rank": 16,
        "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "head_dim": 16,
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "first_k_dense_replace": 2, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False,
        "routed_scaling_factor": 1.0, "hidden_act": "silu",
    },
}  # fmt: skip


def steps(model: str, lengths: list[list[int]], **settings: Any) -> dict[str, Any]:
    """A step on each packing, after a first step on another one."""
    rank = build(MODELS[model], **settings)
    traces = []
    for sample_lengths in ([sum(lengths[0]) // 2] * 2, *lengths):
        with record() as trace:
            rank.stepper.train_step([rank.batch(*sample_lengths)])
        traces.append({"kernels": dict(trace.kernels), "syncs": trace.syncs_in()})
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    return {"line": rank.model.messages[0], "steps": traces[1:], "cudnn": cudnn}


def attention_of(kernels: dict[str, int]) -> dict[str, int]:
    """Attention kernels, without the compiled regions of ``engine.attention``."""
    return {
        name: number
        for name, number in kernels.items()
        if ("attention" in name or "varlen" in name) and not name.startswith("region ")
    }


FEW, MANY = [256], [16] * 16


@pytest.mark.thorough_cases("sm_90-qwen3-_flash_attention_forward")
@pytest.mark.parametrize(
    ("gpu", "model", "kernel"),
    [
        ("sm_90", "qwen3", "_flash_attention_forward"), ("gfx942", "mistral", "_flash_attention_forward"),
        ("sm_90", "deepseek_v2", "_flash_attention_forward"), ("gfx942", "gemma2", "flex_attention"),
    ],
)  # fmt: skip
def test_kernels_do_not_depend_on_the_number_of_samples(fake_cuda: FakeCuda, gpu: str, model: str, kernel: str) -> None:
    results = fake_cuda.run(steps, gpu=gpu, model=model, lengths=[FEW, MANY])
    few, many = (item["kernels"] for item in results["steps"])
    assert attention_of(few) == attention_of(many) == {kernel: 2, kernel.removesuffix("_forward") + "_backward": 2}
    assert Counter(many) - Counter(few) == Counter(few) - Counter(many) == Counter()
    padded_values = 2 if model == "deepseek_v2" else 0  # one in each layer
    assert many.get("slice_backward", 0) == padded_values
    assert many.get("select_backward", 0) <= 1  # of the step, none of the 2 layers
    assert not [sync for step in results["steps"] for sync in step["syncs"] if "attention" in sync or "varlen" in sync]


def test_cudnn_attends_within_a_sequence_that_is_one_sample(fake_cuda: FakeCuda) -> None:
    """Only if it is selected, for lengths that recur, and without waiting for the GPU."""
    settings = {"sections": {"train": {"attention": "cudnn"}}}
    results = fake_cuda.run(steps, model="qwen3", lengths=[FEW, MANY, [200]], **settings)
    one, several, other = (attention_of(step["kernels"]) for step in results["steps"])
    kernel = "_scaled_dot_product_cudnn_attention"
    assert one == {kernel: 2, f"{kernel}_backward": 2}
    assert several == other == {"_flash_attention_forward": 2, "_flash_attention_backward": 2}
    few, many = (Counter(results["steps"][number]["kernels"]) for number in (0, 1))
    assert few - many == Counter(one)  # no copies to another layout
    assert not [sync for step in results["steps"] for sync in step["syncs"] if "attention" in sync or "cudnn" in sync]
    assert results["line"].startswith("attention: cudnn, cuDNN for packed sequences of one sample")


@pytest.mark.thorough_cases("0-qwen3")
@pytest.mark.parametrize(("rank", "model"), [(0, "qwen3"), (3, "mistral")])
def test_context_parallel_ranks_call_the_kernel_once_per_span(fake_cuda: FakeCuda, rank: int, model: str) -> None:
    results = fake_cuda.run(steps, model=model, lengths=[[2048], [128] * 16], rank=rank, size=4, cp=4)
    few, many = (item["kernels"] for item in results["steps"])
    assert few["_flash_attention_forward"] == many["_flash_attention_forward"] <= 2 * 16
    assert not many.get("slice_backward")


@pytest.mark.thorough_cases("qwen3-fp32")
@pytest.mark.parametrize(("model", "precision"), [("mistral", "bf16"), ("qwen3", "fp32")])
def test_sdpa_needs_no_plain_matmuls(fake_cuda: FakeCuda, model: str, precision: str) -> None:
    """Which save all probabilities: for a mask or float32 with grouped query heads, the keys are copied instead."""
    settings = {"sections": {"train": {"attention": "sdpa"}}, "precision": precision}
    results = fake_cuda.run(steps, model=model, lengths=[[40, 24]], **settings)
    names = set(attention_of(results["steps"][0]["kernels"]))
    assert names and not any("math" in name for name in names)
    assert "bmm" not in results["steps"][0]["kernels"]
    assert not results["steps"][0]["kernels"].get("slice_backward")
    assert not results["cudnn"]
