"""Layouts that do not fit the model are refused with values that are possible."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.config.load import load_config
from isthmus.config.schema import MoeConfig, OptimConfig, ParallelConfig, RolloutConfig, TrainConfig
from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture, from_settings
from isthmus.families.registry import all_families
from isthmus.recipes.plan.layout_checks import (
    check_async_layout,
    check_batch_invariant,
    check_experts,
    check_fsdp,
    check_fsdp_precision,
    check_fsdp_torch,
    check_layout,
    check_micro_batches,
    check_offload,
)
from ranks.tiny import OWN_SIZES
from ranks.tiny import SIZES as TINY_SIZES

SIZES = {"hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 8}
ENDS = {"vocab_size": 77, "max_position_embeddings": 128, "norm_epsilon": 1e-6}


def check(num_layers: int, **sizes: int) -> None:
    architecture = from_settings({"family": "llama", "num_layers": num_layers, **SIZES, **ENDS})  # type: ignore[arg-type]
    check_layout(architecture, ParallelConfig(**sizes))


@pytest.mark.parametrize(
    ("num_layers", "sizes"), [(5, {"pp": 2}), (7, {"pp": 7}), (8, {"pp": 2, "vpp": 4}), (12, {"pp": 3, "vpp": 2})]
)
def test_stages_that_fit(num_layers: int, sizes: dict[str, int]) -> None:
    check(num_layers, **sizes)


@pytest.mark.parametrize(
    ("num_layers", "sizes", "message"),
    [
        (3, {"pp": 4}, r"pp=4 is more than the 3 layers \(llama\)\. Use 3 or less\."),
        (1, {"pp": 2}, r"pp=2 is more than the 1 layers \(llama\)\. Use 1\."),
        (12, {"pp": 2, "vpp": 4}, r"= 8 stages do not divide num_layers=12 .* Use vpp=2 or 3 or 6, or leave it out\."),
        (5, {"pp": 2, "vpp": 2}, r"pp=2 x vpp=2 = 4 stages do not divide num_layers=5 .* Leave vpp out\."),
    ],
)
def test_stages_that_do_not_fit(num_layers: int, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check(num_layers, **sizes)


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear"])
def test_context_parallelism_needs_attention_in_every_layer(family: str) -> None:
    config = TINY_SIZES | OWN_SIZES[family] | {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    architecture = all_families()[family].to_architecture(config)
    check_layout(architecture, ParallelConfig(tp=2))
    with pytest.raises(UsageError, match=r"parallel\.cp=2 splits samples, and the state of \w+ layers passes"):
        check_layout(architecture, ParallelConfig(cp=2))
    with pytest.raises(
        UsageError, match="tp=4 does not divide num_key_heads of the delta net=2" if "qwen" in family else "tp=8"
    ):
        check_layout(architecture, ParallelConfig(tp=4 if "qwen" in family else 8))


def test_interleaved_schedule_divides_the_batch() -> None:
    sizes = ParallelConfig(pp=4, vpp=2)
    check_micro_batches(TrainConfig(steps=1, global_batch_size=16, micro_batch_size=2), sizes, 8)
    check_micro_batches(TrainConfig(steps=1, global_batch_size=6), ParallelConfig(pp=4), 4)
    train = TrainConfig(steps=1, global_batch_size=20, micro_batch_size=2)
    with pytest.raises(UsageError, match=r"batch_size=20 is not a multiple of .* Use 16 or 32, or leave parallel.vpp"):
        check_micro_batches(train, sizes, 8)


@pytest.mark.parametrize(
    ("sizes", "here", "reason"),
    [
        ({"tp": 1}, {}, "parallel.tp=1 has no communication"),
        ({"tp": 2, "sp": False}, {}, "parallel.sp=false has no gathers"),
        ({"tp": 2, "fsdp": True}, {}, "parallel.fsdp"),
        ({"tp": 2}, {"precision": "fp8"}, "fp8 layers quantize"),
        ({"tp": 2}, {"device_type": "cpu"}, "it is for GPUs"),
        ({"tp": 16}, {}, "must be on one machine, which has 8"),
    ],
)
def test_async_tp_needs_gpus_of_one_machine(sizes: dict[str, Any], here: dict[str, str], reason: str) -> None:
    run: dict[str, Any] = {"device_type": "cuda", "precision": "bf16", "ranks_here": 8} | here
    check_async_layout(ParallelConfig(**sizes), **run)
    with pytest.raises(UsageError, match=rf"parallel.async_tp=true: .*{reason}.* Leave parallel.async_tp out"):
        check_async_layout(ParallelConfig(**sizes, async_tp=True), **run)
    check_async_layout(ParallelConfig(tp=8, async_tp=True), "cuda", "bf16", ranks_here=8)


def test_offload_needs_a_gpu_and_the_distributed_optimizer() -> None:
    offload = OptimConfig(offload=True)
    stays, leaves = RolloutConfig(), RolloutConfig(offload=True)
    check_offload(offload, leaves, ParallelConfig(), "cuda")
    check_offload(OptimConfig(), leaves, ParallelConfig(fsdp=True), "cuda")
    check_offload(OptimConfig(), stays, ParallelConfig(fsdp=True), "cpu")
    with pytest.raises(UsageError, match=r"optim.offload=true moves .* this run is on a CPU. Leave it out"):
        check_offload(offload, stays, ParallelConfig(), "cpu")
    with pytest.raises(UsageError, match=r"rollout.offload=true moves .* this run is on a CPU. Leave it out"):
        check_offload(OptimConfig(), leaves, ParallelConfig(), "cpu")
    with pytest.raises(UsageError, match=r"parallel.fsdp does not use"):
        check_offload(offload, stays, ParallelConfig(fsdp=True), "cuda")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"pp": 2}, "parallel.pp=2"), ({"ep": 2}, "parallel.ep=2"), ({"tp": 2, "etp": 1}, "parallel.etp=1")],
)
def test_fsdp_refuses_other_layouts(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_fsdp(ParallelConfig(fsdp=True, **sizes))


@pytest.mark.parametrize(
    ("fsdp", "shards", "line"),
    [(False, 1, "dp=4"), (1, 1, "dp=4"), (True, 8, "dp=4 +fsdp"), (8, 8, "dp=4 +fsdp=8"), (2, 2, "dp=4 +fsdp=2")],
)
def test_ranks_that_fsdp_shards_over(fsdp: bool | int, shards: int, line: str) -> None:
    parallel = ParallelConfig(cp=2, fsdp=fsdp)
    parallel.check_world_size(8)
    assert parallel.shards(8) == shards and parallel.describe(8).endswith(line)
    assert bool(parallel.fsdp) is (shards > 1)


def test_fsdp_divides_the_data_parallel_ranks() -> None:
    message = r"parallel\.fsdp=4 does not divide the dp x cp = 6 ranks .* Use 2 or 3 or 6, or start another number"
    with pytest.raises(UsageError, match=message):
        ParallelConfig(tp=2, cp=2, fsdp=4).check_world_size(12)


def test_fsdp_allows_tensor_parallelism() -> None:
    check_fsdp(ParallelConfig(fsdp=True, tp=2, sp=True))


def test_fsdp_needs_a_torch_that_sums_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    check_fsdp_torch(ParallelConfig())
    monkeypatch.delattr("torch.distributed.fsdp.FSDPModule.set_force_sum_reduction_for_comms", raising=False)
    check_fsdp_torch(ParallelConfig())
    with pytest.raises(UsageError, match=r"averages gradients, .* Use torch 2.10 or newer"):
        check_fsdp_torch(ParallelConfig(fsdp=True))


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_fsdp_refuses_scaled_precisions(precision: str) -> None:
    check_fsdp_precision(ParallelConfig(), precision)
    with pytest.raises(UsageError, match=f"train.precision={precision}"):
        check_fsdp_precision(ParallelConfig(fsdp=True), precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fsdp_allows_plain_precisions(precision: str) -> None:
    check_fsdp_precision(ParallelConfig(fsdp=True), precision)


def architecture(family: str) -> Architecture:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **{**TINY_SIZES, **OWN_SIZES.get(family, {})})
    return all_families()[family].to_architecture(config.to_dict())


@pytest.mark.parametrize(
    ("family", "moe", "why"),
    [
        ("qwen3", {"aux_loss": 0.1}, "moe.aux_loss is for MoE models"),
        ("qwen3_moe", {"expert_bias_update_rate": 0.1}, "moe.expert_bias_update_rate=0.1 .* qwen3_moe has none"),
        ("deepseek_v3", {"expert_bias_update_rate": 0.1, "capacity_factor": 1.5}, None),
        ("qwen3", {}, None),
    ],
)
def test_expert_settings_need_experts(family: str, moe: dict[str, Any], why: str | None) -> None:
    if why is None:
        return check_experts(architecture(family), MoeConfig(**moe))
    with pytest.raises(UsageError, match=why):
        check_experts(architecture(family), MoeConfig(**moe))


def test_fp8_experts_need_experts() -> None:
    check_experts(architecture("qwen3_moe"), MoeConfig(), fp8=True)
    with pytest.raises(UsageError, match=r"train.fp8_experts=true is for MoE models, and .* no experts \(qwen3\)"):
        check_experts(architecture("qwen3"), MoeConfig(), fp8=True)


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"tp": 2, "ep": 2, "etp": 1, "sp": False}, "parallel.sp=true"),
        ({"tp": 2, "sp": True, "ep": 2, "etp": 1}, None),
        ({"ep": 4}, "ep=4 does not divide num_experts=6"),
        ({"etp": 2}, None),
    ],
)
def test_expert_layouts(sizes: dict[str, Any], why: str | None) -> None:
    if why is None:
        return check_layout(architecture("qwen3_moe"), ParallelConfig(**sizes))
    with pytest.raises(UsageError, match=why):
        check_layout(architecture("qwen3_moe"), ParallelConfig(**sizes))


@pytest.mark.parametrize(
    ("settings", "other"),
    [
        ({"train.precision": "fp8"}, "train.precision=fp8"),
        ({"train.gemm_tuning": True}, "train.gemm_tuning=true"),
        ({"parallel.async_tp": True, "parallel.tp": 2}, "parallel.async_tp=true"),
    ],
)
def test_batch_invariant_matmuls_exclude_other_kernels(settings: dict[str, Any], other: str) -> None:
    flags = {"model": "m", "data": ["d"], "out": "o", "train.batch_invariant": True}
    config = load_config("pretrain", None, flags=flags | settings)
    with pytest.raises(UsageError, match=f"and so does {other}. Leave one of them out"):
        check_batch_invariant(config, "cuda", str(settings.get("train.precision", "bf16")))


def test_batch_invariant_matmuls_are_for_gpus() -> None:
    flags = {"model": "m", "data": ["d"], "out": "o", "train.batch_invariant": True}
    config = load_config("pretrain", None, flags=flags)
    check_batch_invariant(config, "cuda", "bf16")
    with pytest.raises(UsageError, match=r"train\.batch_invariant=true is for GPUs"):
        check_batch_invariant(config, "cpu", "fp32")
    with pytest.raises(UsageError, match="multiply float32 in TF32"):
        check_batch_invariant(config, "cuda", "fp32")
