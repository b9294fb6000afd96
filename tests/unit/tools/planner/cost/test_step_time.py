"""The laws that the time of a step follows, whatever its constants are."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from isthmus.config.schema import ParallelConfig, RunConfig
from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture, from_settings
from isthmus.families.blocks.feed_forward import Experts
from isthmus.families.blocks.latent_attention import Latent
from isthmus.platforms.parts import Part, part_named
from isthmus.tools.planner.cost import kernels, layer_time
from isthmus.tools.planner.cost.cluster import Cluster, Ring
from isthmus.tools.planner.cost.kernels import Kernels
from isthmus.tools.planner.cost.step_time import FORMULAS, GROUPS, StepTime, step_time
from isthmus.tools.planner.cost.workload import Generation, Workload
from isthmus.train.flops import flops_per_batch

DENSE = from_settings({
    "family": "llama", "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32,
    "num_query_groups": 8, "kv_channels": 128, "vocab_size": 128256, "max_position_embeddings": 1 << 17,
    "norm_epsilon": 1e-5,
})  # fmt: skip
EXPERTS = DENSE.with_settings({"moe": Experts(num_experts=64, top_k=4, ffn_hidden_size=2048)})
LATENT = DENSE.with_settings(
    {
        "num_query_groups": 32,
        "kv_channels": 192,
        "mla": Latent(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=1536),
    }
)


def planned(
    arch: Architecture = DENSE,
    *,
    nodes: int = 1,
    gpu: str | Part = "H100",
    layout: dict[str, Any] | None = None,
    **work: Any,
) -> StepTime:
    part = part_named(gpu) if isinstance(gpu, str) else gpu
    settings: dict[str, Any] = {"precision": "bf16", "seq_length": 8192, "global_batch_size": 512} | work
    return step_time(
        Workload(architecture=arch, **settings), ParallelConfig(**layout or {}), Cluster(part, nodes=nodes)
    )


def test_twice_the_nodes_with_twice_the_batch_take_as_long_and_communicate_more() -> None:
    item, two = planned(nodes=2, layout={"tp": 8}), planned(nodes=4, layout={"tp": 8}, global_batch_size=1024)
    for name in ("gemm", "attention", "memory", "tp"):
        assert item.parts[name] == pytest.approx(two.parts[name])
    assert two.parts["dp"] > item.parts["dp"] and two.parts["optimizer"] < item.parts["optimizer"]
    assert 0.95 < two.total_s / item.total_s < 1.05
    assert two.tokens_per_s == pytest.approx(2 * item.tokens_per_s * item.total_s / two.total_s)


def test_twice_the_nodes_with_the_same_batch_are_at_most_twice_as_fast() -> None:
    seconds = [planned(nodes=nodes).total_s for nodes in (1, 2, 4, 8)]
    assert all(1.5 < before / after < 2.0 for before, after in pairwise(seconds))


def test_tensor_parallelism_across_nodes_costs_more_than_within_one() -> None:
    for gpu, more in (("H100", 1.0), ("A100", 1.2)):  # the network of the second is slower than its links
        within = replace(part_named(gpu), linked_devices=16, rack=True)
        across = planned(nodes=2, layout={"tp": 16}, gpu=gpu)
        assert across.parts["tp"] > more * planned(nodes=2, layout={"tp": 16}, gpu=within).parts["tp"]
        assert across.binds == "tp"
    slow = replace(part_named("H100"), link_gb_s=100)
    assert planned(gpu=slow, layout={"tp": 8}).parts["tp"] > 3 * planned(layout={"tp": 8}).parts["tp"]
    assert planned(layout={"tp": 8, "async_tp": True}).parts["tp"] < planned(layout={"tp": 8}).parts["tp"]


@pytest.mark.parametrize(
    ("pp", "vpp", "batch"), [(2, 1, 64), (4, 1, 64), (4, 1, 128), (8, 1, 64), (4, 2, 64), (4, 4, 64)]
)
def test_the_bubble_is_that_of_the_schedule(pp: int, vpp: int, batch: int) -> None:
    """(pp - 1) / (vpp m) of the time of m micro batches, for equal stages."""
    even = replace(DENSE, vocab_size=256)
    step = planned(even, layout={"pp": pp, "vpp": vpp}, global_batch_size=batch)
    number = batch // (8 // pp)
    busy = sum(step.parts[name] for name in ("gemm", "attention", "memory"))
    assert step.micro_batches == number
    assert step.parts["bubble"] / busy == pytest.approx((pp - 1) / vpp / number, rel=0.02)


def test_the_stage_with_the_logits_makes_the_others_wait() -> None:
    large, small = (planned(replace(DENSE, vocab_size=v), layout={"pp": 8}).total_s for v in (256_000, 256))
    alone = planned(replace(DENSE, vocab_size=256_000)).total_s - planned(replace(DENSE, vocab_size=256)).total_s
    assert large - small > 4 * alone


def test_full_recomputation_adds_a_forward_pass() -> None:
    none, full = planned(), planned(recompute="full")
    # The matmuls of the layers are two thirds backward, attention 2.5 of 3.5.
    assert 0.9 < full.parts["recompute"] / (none.parts["gemm"] / 3 + none.parts["attention"] / 3.2) < 1.1
    half = planned(recompute="full", recompute_layers=16)
    assert half.parts["recompute"] == pytest.approx(full.parts["recompute"] / 2)
    assert half.mfu > full.mfu and full.parts["gemm"] == none.parts["gemm"]


def test_selective_recomputation_repeats_its_modules_only() -> None:
    seconds = {
        names: planned(recompute="selective", recompute_modules=names).parts["recompute"]
        for names in (("core_attn",), ("mlp",), ("layernorm",), ("layernorm", "mlp_act", "rope"))
    }
    step = planned()
    share = kernels.FORWARD_ATTENTION / kernels.BACKWARD_ATTENTION * 2.5  # of backward to forward attention
    assert seconds["core_attn",] == pytest.approx(step.parts["attention"] / (1 + share))
    assert 0 < seconds["layernorm",] < seconds["layernorm", "mlp_act", "rope"] < 0.5 * step.parts["memory"]
    assert seconds["mlp",] > seconds["core_attn",]
    assert planned(EXPERTS, recompute="selective", recompute_modules=("mlp",)).parts["recompute"] == 0


def test_the_exchange_of_tokens_grows_with_expert_parallelism() -> None:
    seconds = [planned(EXPERTS, nodes=8, layout={"ep": ep}).parts["ep"] for ep in (1, 2, 4, 8, 16, 32, 64)]
    assert seconds[0] == 0 and seconds == sorted(seconds)
    assert seconds[4] > 3 * seconds[3]  # the first that leaves the node
    more = EXPERTS.with_settings({"moe": replace(EXPERTS.moe, top_k=8)})  # type: ignore[type-var]
    assert planned(more, layout={"ep": 8}).parts["ep"] == pytest.approx(
        2 * planned(EXPERTS, layout={"ep": 8}).parts["ep"], rel=0.05
    )


def test_few_tokens_per_expert_are_slow() -> None:
    """The same FLOPs in more and narrower experts take longer."""
    wide = DENSE.with_settings({"moe": Experts(num_experts=8, top_k=1, ffn_hidden_size=8192)})
    narrow = DENSE.with_settings({"moe": Experts(num_experts=512, top_k=16, ffn_hidden_size=512)})
    assert planned(narrow, seq_length=1024).parts["gemm"] > 1.3 * planned(wide, seq_length=1024).parts["gemm"]


def test_adapters_have_no_weight_gradients_of_the_base_and_little_to_exchange() -> None:
    full, lora = planned(nodes=4), planned(nodes=4, lora_rank=16)
    assert lora.parts["gemm"] == pytest.approx(full.parts["gemm"] * 2 / 3, rel=0.05)
    assert lora.parts["dp"] < 0.05 * full.parts["dp"] and lora.parts["optimizer"] < 0.02 * full.parts["optimizer"]
    assert lora.parts["memory"] > full.parts["memory"]
    assert planned(lora_rank=16, quantized=True).parts["memory"] > planned(lora_rank=16).parts["memory"]


def test_fsdp_exchanges_every_micro_batch_and_hides_it_behind_large_ones() -> None:
    small = planned(nodes=8, layout={"fsdp": True}, seq_length=512)
    replicas = planned(nodes=8, seq_length=512)
    assert small.binds == "dp" and small.parts["dp"] > 2 * replicas.parts["dp"]
    large = planned(nodes=8, layout={"fsdp": True}, seq_length=512, micro_batch_size=8)
    assert large.parts["dp"] < small.parts["dp"] / 4 and large.binds != "dp"


def test_copies_of_a_node_exchange_weights_within_it_and_gradients_once() -> None:
    """HSDP: the state is that of fewer ranks, and a step with many micro batches waits less."""
    work: dict[str, Any] = {"nodes": 16, "seq_length": 1024, "global_batch_size": 512}
    everywhere, node = (planned(layout={"fsdp": fsdp}, **work) for fsdp in (True, 8))
    assert node.parts["dp"] < 0.6 * everywhere.parts["dp"]
    assert node.parts["optimizer"] == pytest.approx(16 * everywhere.parts["optimizer"], rel=0.01)
    assert planned(layout={"fsdp": 128}, **work) == everywhere
    once = planned(layout={"fsdp": True, "fsdp_reduce": "step"}, **work)
    assert once.parts["dp"] < 0.8 * everywhere.parts["dp"] and once.parts["memory"] > everywhere.parts["memory"]


def test_long_contexts_are_attention_and_context_parallelism_splits_it() -> None:
    short = planned(global_batch_size=16 * 32, micro_batch_size=16)
    long = planned(seq_length=131072, global_batch_size=32)
    assert long.parts["attention"] == pytest.approx(16 * short.parts["attention"])
    assert long.parts["gemm"] == pytest.approx(short.parts["gemm"])
    split = planned(seq_length=131072, global_batch_size=32, layout={"cp": 8})
    assert split.parts["attention"] == pytest.approx(long.parts["attention"]) and split.parts["cp"] > 0
    window = planned(DENSE.with_settings({"sliding_window": 4096}), seq_length=131072, global_batch_size=32)
    assert window.parts["attention"] == pytest.approx(long.parts["attention"] / 16, rel=0.01)
    packed = planned(seq_length=131072, global_batch_size=32, samples_per_sequence=16)
    assert packed.parts["attention"] == pytest.approx(long.parts["attention"] / 16, rel=0.01)


@pytest.mark.parametrize("arch", [DENSE, EXPERTS, LATENT], ids=["dense", "experts", "latent attention"])
def test_flops_are_those_of_a_run_and_all_of_them_take_time(
    arch: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With perfect kernels, matmuls and attention take FLOPs over the peak; only attention's backward pass has more."""
    for name in ("GEMM_SHARE", "FORWARD_ATTENTION", "BACKWARD_ATTENTION"):
        monkeypatch.setattr(kernels, name, 1.0)
    for name in ("HALF_TILES", "HALF_DEPTH", "LAUNCH_S"):
        monkeypatch.setattr(kernels, name, 0.0)
    monkeypatch.setattr(kernels, "WIDE_HEAD", 0)
    part = replace(part_named("H100"), measured_tflops={"bf16": 989.4}, memory_gb_s=1e9)
    step = planned(arch, gpu=part, global_batch_size=64)
    flops = flops_per_batch(arch, step.work.tokens, step.work.tokens * 8192)
    assert step.tflops_per_device * step.total_s * 8e12 == pytest.approx(flops)
    ideal = flops / 8 / 989.4e12
    matmuls = step.parts["gemm"] + step.parts["loss"]
    assert matmuls + step.parts["attention"] * 3 / 3.5 == pytest.approx(ideal, rel=1e-3)


def test_offloaded_moments_take_the_time_of_their_copies() -> None:
    resident, offloaded = planned(), planned(offload=True)
    assert offloaded.parts["optimizer"] > 5 * resident.parts["optimizer"]
    assert offloaded.parts["optimizer"] > 16 * 8.03e9 / 8 / 64e9


def test_a_state_that_leaves_for_generation_takes_the_time_of_two_copies() -> None:
    generation = Generation(answers=64, new_tokens=64, batch_size=64, offload=True)
    seconds = planned(generation=generation).parts["offload"]
    assert seconds == pytest.approx(2 * 12 * 8.03e9 / 8 / (0.8 * 64e9), rel=1e-3)
    assert planned(generation=replace(generation, updates=4)).parts["offload"] == pytest.approx(seconds / 4)
    assert planned(generation=generation, offload=True).parts["offload"] == pytest.approx(seconds / 3)
    assert planned(generation=replace(generation, offload=False)).parts["offload"] == 0


def test_parts_sum_to_the_step_and_each_has_a_formula() -> None:
    generation = Generation(answers=512, new_tokens=64, batch_size=64, offload=True)
    others = {"teacher": DENSE, "generation": generation}
    step = planned(EXPERTS, nodes=4, layout={"tp": 2, "pp": 2, "cp": 2, "ep": 4, "etp": 1}, **others)
    assert step.parts.keys() == FORMULAS.keys() and all(
        seconds > 0 for name, seconds in step.parts.items() if name not in ("recompute", "host")
    )
    assert sum(step.parts.values()) == pytest.approx(step.total_s)
    assert sorted(part for parts in GROUPS.values() for part in parts) == sorted(FORMULAS)
    assert sum(step.shares.values()) == pytest.approx(1)
    assert step.tokens_per_s_per_device * 32 == pytest.approx(step.tokens_per_s) == step.work.tokens / step.total_s
    assert 0.05 < step.mfu < 0.6


def test_a_step_waits_for_a_slow_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned().parts["host"] == 0
    monkeypatch.setattr(layer_time, "HOST_KERNEL_S", 0.1)
    step = planned(global_batch_size=8)
    busy = sum(step.parts[name] for name in ("gemm", "attention", "memory", "loss"))
    assert step.parts["host"] == pytest.approx(32 * (18 * 0.1 + 8 * 15e-6) - busy)


def test_precision_and_part_change_the_speed_as_their_data_sheets() -> None:
    assert planned(precision="fp8").parts["gemm"] < 0.65 * planned().parts["gemm"]
    assert planned(precision="fp8").parts["memory"] > planned().parts["memory"]
    assert planned(precision="fp32").parts["gemm"] > 5 * planned().parts["gemm"]
    assert planned(gpu="B200").total_s < 0.6 * planned().total_s < planned(gpu="A100").total_s / 2
    with pytest.raises(UsageError, match="precision=fp8: the A100 80 GB computes in bf16, fp16, fp32"):
        planned(gpu="A100", precision="fp8")


def test_small_gemms_are_slower_per_flop_and_thin_ones_limited_by_memory() -> None:
    result = Kernels(part_named("H100"), "bf16")
    speed = [size**3 / result.gemm(size, size, size) for size in (256, 512, 1024, 2048, 4096, 8192)]
    assert speed == sorted(speed) and speed[-1] > 5 * speed[1]
    moved = 2 * (16 * 8192 + 8192 * 65536 + 16 * 65536)
    assert result.gemm(16, 65536, 8192) == pytest.approx(moved / result.bytes_per_s)


def test_collectives() -> None:
    h100, mi300x = (Cluster(part_named(name), nodes=4) for name in ("H100", "MI300X"))
    size = 1 << 30
    assert Ring(h100, 1).gather(size) == 0
    # Half of the ranks of a mesh use 3 of 7 links.
    assert Ring(mi300x, 4).gather(size) / Ring(mi300x, 8).gather(size) == pytest.approx(
        7 / 3 * (3 / 4) / (7 / 8), rel=0.02
    )
    # A group with all GPUs of its nodes uses all their network cards, one with a GPU each only its own.
    assert Ring(h100, 4, 8).gather(size) > 5 * Ring(h100, 32).gather(size)
    assert Ring(h100, 16).all_to_all(size) > 3 * Ring(h100, 8).all_to_all(size)
    four = Cluster(part_named("H100"), 4, 2)
    assert Ring(four, 8).in_node == 4 and Ring(four, 8).gather(size) > Ring(h100, 8).gather(size)
    bridged = Cluster(part_named("H100 NVL"), 8)
    assert Ring(bridged, 8).gather(size) > 5 * Ring(bridged, 2).gather(size)
    rack = Cluster(part_named("GB200"), 4, 16)
    assert Ring(rack, 64).in_node == 64 and Ring(h100, 32).in_node == 8 and Ring(h100, 4, 8).in_node == 1
    assert Ring(h100, 4, 8).send(size) > 5 * Ring(h100, 4, 1).send(size)


def test_the_workload_of_a_run() -> None:
    def of(recipe: str, **sections: Any) -> Workload:
        settings = {
            "recipe": recipe,
            "out": "o",
            "model": {"path": "m"},
            "data": {"files": ["d.jsonl"], "seq_length": 4096},
            "train": {"steps": 1},
        }
        config = RunConfig.model_validate(settings | sections)
        return Workload.from_config(config, DENSE, "bf16")

    assert of("sft").tokens == 16 * 4096 and of("sft").teacher is None and of("sft").lora_rank is None
    assert of("dpo").tokens == 2 * 16 * 4096
    assert of("kto").teacher is DENSE and of("kto", kto={"loss": "apo_zero_unpaired"}).teacher is None
    train = {"steps": 1, "global_batch_size": 64, "micro_batch_size": 4, "recompute": "full", "recompute_layers": 3}
    result = of("sft", train=train, lora={"rank": 8, "quantize": "nf4"})
    assert (result.global_batch_size, result.micro_batch_size, result.recompute, result.recompute_layers) == (
        64,
        4,
        "full",
        3,
    )
    assert (result.lora_rank, result.quantized) == (8, True)
    assert of("sft", optim={"offload": True}).offload


def generated(nodes: int = 1, layout: dict[str, Any] | None = None, **generation: int) -> float:
    settings = {"answers": 512, "new_tokens": 1024, "batch_size": 64} | generation
    return planned(nodes=nodes, layout=layout, generation=Generation(**settings)).parts["generation"]


def test_generation_reads_the_weights_for_each_token() -> None:
    weights_s = 2 * 7.5e9 / part_named("H100").memory_gb_s / 1e9
    seconds = generated(batch_size=1, answers=8)
    assert 1024 * weights_s < seconds < 1.5 * 1024 * weights_s
    assert generated(new_tokens=2048, batch_size=1, answers=8) == pytest.approx(2 * seconds, rel=0.1)


def test_generation_is_faster_with_more_sequences_at_a_time_and_shards() -> None:
    assert generated(batch_size=64) < generated(batch_size=8) / 2
    assert generated(layout={"tp": 8}) == pytest.approx(generated())  # 8 times as many answers a rank, of 8 ranks
    assert generated(layout={"tp": 8}, answers=64) == pytest.approx(generated() / 8)
