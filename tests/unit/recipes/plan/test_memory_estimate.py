"""Memory estimates of published models, and what is refused; tests/ranks compares the estimate with real ranks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from isthmus.config.schema import RunConfig
from isthmus.engine.linear import packed_weights
from isthmus.errors import UsageError
from isthmus.families.registry import family_for
from isthmus.platforms.cpu import CpuPlatform
from isthmus.recipes.plan.memory_estimate import MARGIN, MemoryEstimate, check_memory, estimate_memory, estimate_ranks
from isthmus.recipes.plan.model_plan import ModelPlan

LLAMA_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
DEEPSEEK_LITE = {
    "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "topk_method": "greedy", "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
}  # fmt: skip


def config(length: int = 8192, layout: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "recipe": "pretrain", "out": "o", "model": {"path": "m"}, "data": {"mock": True, "seq_length": length},
            "train": {"steps": 1, "micro_batch_size": 2, "global_batch_size": 128, **train},
            "parallel": {"sp": False, **(layout or {})},
        }
    )  # fmt: skip


def plan_of(hf: dict[str, Any], run: RunConfig, ranks: int = 8) -> ModelPlan:
    family = family_for(hf)
    return ModelPlan(None, None, family, family.to_architecture(hf), run.parallel, ranks)  # type: ignore[arg-type]


def estimate(hf: dict[str, Any], **layout: Any) -> MemoryEstimate:
    run = config(layout=layout)
    return estimate_memory(plan_of(hf, run), run, "bf16")


@pytest.mark.parametrize("layout", [{"tp": 2, "pp": 2}, {"fsdp": True}], ids=str)
def test_a_teacher_has_weights_and_hidden_states(layout: dict[str, Any]) -> None:
    run = config(layout=layout)
    student, teacher = plan_of(LLAMA_8B, run), plan_of(LLAMA_70B, run)
    teacher = replace(teacher, frozen=frozenset(teacher.family.placements(teacher.architecture)))
    distill = {"teacher": "t", "teacher_dtype": "bfloat16"}
    run = RunConfig.model_validate(run.model_dump() | {"recipe": "distill", "distill": distill})
    both = estimate_memory(replace(student, teacher=teacher), run, "bf16")
    alone = estimate_memory(student, run, "bf16")
    share = 2 * 70_553_706_496 // (8 if "fsdp" in layout else 4)
    gathered = 2 * (128256 * 8192 + 8192 + 855_654_400) if "fsdp" in layout else 0
    assert both.teacher == pytest.approx(share + gathered, rel=0.02)
    assert both.total - alone.total >= both.teacher and both.gradients == alone.gradients
    # Of a micro batch of 16,384 tokens, with a pipeline of all 32 of a step on the last stage.
    last = estimate_ranks(replace(student, teacher=teacher), run, "bf16")[-1]
    hidden = last.activations - estimate_ranks(student, run, "bf16")[-1].activations
    assert hidden == 2 * 8192 * 16384 * (32 if "pp" in layout else 1)


@pytest.mark.parametrize(
    ("hf", "published"),
    [(LLAMA_8B, 8_030_261_248), (LLAMA_70B, 70_553_706_496), (DEEPSEEK_LITE, 15_706_484_224)],
)
def test_published_sizes(hf: dict[str, Any], published: int) -> None:
    full = estimate(hf)
    assert full.parameters == published
    assert full.gradients == 4 * published and abs(full.optimizer - 12 * published / 8) < 2**21
    assert full.weights == pytest.approx(2 * published, rel=1e-3)  # DeepSeek's routers are float32


def test_layouts_reduce_the_estimate() -> None:
    complete = estimate(LLAMA_8B)
    embedding = 128256 * 4096
    cut = estimate(LLAMA_8B, tp=8, sp=True)
    assert cut.parameters * 8 == pytest.approx(complete.parameters, rel=1e-3)
    assert cut.activations < complete.activations / 6
    staged = estimate(LLAMA_8B, pp=2)
    # The first stage has more micro batches in flight, so it needs most.
    assert staged.parameters == (complete.parameters - 2 * embedding - 4096) // 2 + embedding
    sharded = estimate(LLAMA_70B, fsdp=True)
    assert sharded.persistent < estimate(LLAMA_70B).persistent / 3 and sharded.optimizer == -(-70_553_706_496 // 8) * 8
    copies = estimate(LLAMA_70B, fsdp=4)
    assert copies.optimizer == 2 * sharded.optimizer and copies.gradients == 2 * sharded.gradients
    assert estimate(LLAMA_70B, fsdp=8) == sharded
    once = estimate(LLAMA_70B, fsdp=True, fsdp_reduce="step")
    assert once.total - sharded.total == 4 * 70_553_706_496 and once.persistent == sharded.persistent
    experts = estimate(DEEPSEEK_LITE, ep=8)
    outside = 15_706_484_224 - 26 * 64 * 3 * 2048 * 1408
    assert experts.parameters == outside + 26 * 8 * 3 * 2048 * 1408
    run = config(recompute="full")
    full = estimate_memory(plan_of(LLAMA_8B, run), run, "bf16")
    assert full.activations < complete.activations / 4


def test_a_gpu_has_temporary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer, or of the logits of a chunk, without compiled kernels with float32 copies."""
    monkeypatch.setattr("isthmus.engine.compiled.find_compiler", lambda device: ("", "no Triton"))
    run = config(layout={"pp": 2, "tp": 4})
    first, _last = estimate_ranks(plan_of(LLAMA_8B, run), run, "bf16", gpu_bytes=80 << 30)
    tokens, hidden = 2 * 8192, 4096
    assert first.temporary == 2 * tokens * (2 * hidden + 2 * 14336 // 4)
    run = config()
    plain, on_gpu = (estimate_memory(plan_of(LLAMA_8B, run), run, "bf16", gpu_bytes=gpu) for gpu in (None, 80 << 30))
    remaining = plain.total - max(plain.temporary, plain.logits)
    assert on_gpu.logits == on_gpu.total - remaining == 10 * 2**28 + 2 * tokens * hidden
    assert str(on_gpu).endswith("temporary 2.6")
    # A CPU has the activation of the block and its gradient, and a smaller chunk with a block of float32 logits.
    assert plain.temporary == 2 * tokens * (2 * hidden + 4 * 14336)
    assert plain.logits == 2 * 2**25 + 4 * 2**20 + 2 * tokens * hidden
    monkeypatch.setattr("isthmus.engine.compiled.find_compiler", lambda device: ("Triton", ""))
    (compiled,) = estimate_ranks(plan_of(LLAMA_8B, run), run, "bf16", gpu_bytes=80 << 30)
    assert compiled.total - remaining == compiled.temporary == 2 * tokens * (2 * hidden + 2 * 14336)  # > logits
    assert compiled.logits == 2 * 2**28 + 2 * tokens * hidden
    elsewhere = estimate_memory(plan_of(LLAMA_8B, run), run, "bf16", gpu_bytes=80 << 30, compiles=False)
    assert elsewhere == on_gpu
    deterministic = config(deterministic=True)
    assert estimate_memory(plan_of(LLAMA_8B, run), deterministic, "bf16", gpu_bytes=80 << 30) == on_gpu


def test_virtual_stages_have_more_layers_in_flight() -> None:
    """2 * (pp - 1) + (vpp - 1) * pp + 1 chunks of the first rank (arXiv 2104.04473), here of 4 layers."""
    plain, virtual = (estimate(LLAMA_8B, pp=4, vpp=vpp) for vpp in (1, 2))
    assert virtual.activations / plain.activations == pytest.approx(11 / 8, rel=0.01)


def test_a_step_of_several_micro_batches_keeps_fp8_copies_of_linear_weights() -> None:
    item, several = config(global_batch_size=16), config(global_batch_size=32)
    result, bf16 = (estimate_memory(plan_of(LLAMA_8B, several), several, name) for name in ("fp8", "bf16"))
    linear = 8_030_261_248 - 2 * 128256 * 4096 - 65 * 4096  # without embedding, projection and norms
    assert result.quantized == 2 * linear == result.total - bf16.total and "fp8 weights 13.0" in str(result)
    assert estimate_memory(plan_of(LLAMA_8B, item), item, "fp8").quantized == 0
    for scaling, element in (("blockwise", 2.0), ("mxfp8", 2.0625)):  # with a scale of one byte for 32 elements
        scaled = several.model_copy(update={"train": several.train.model_copy(update={"fp8_scaling": scaling})})
        assert estimate_memory(plan_of(LLAMA_8B, scaled), scaled, "fp8").quantized == element * linear
    # Experts and the low-rank projections of latent attention stay in bfloat16.
    attention, mlps = 2048 * 3072 + 512 * 4096 + 2048 * 2048, 3 * 2048 * (10944 + 26 * 2816)
    result = estimate_memory(plan_of(DEEPSEEK_LITE, several), several, "fp8")
    assert result.quantized == 2 * (27 * attention + mlps)
    experts = 26 * 64 * 3 * 2048 * 1408
    train = several.train.model_copy(update={"fp8_experts": True})
    result = estimate_memory(plan_of(DEEPSEEK_LITE, several), several.model_copy(update={"train": train}), "fp8")
    assert result.quantized == 2 * (27 * attention + mlps + experts)


def test_offloaded_moments_need_host_memory_and_pairs_are_two_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = config(layout={"ep": 4})
    plan = plan_of(DEEPSEEK_LITE, plain)
    offload = plain.model_copy(update={"optim": plain.optim.model_copy(update={"offload": True})})
    here, there = (estimate_memory(plan, item, "bf16") for item in (plain, offload))
    assert there.offloaded == here.optimizer - there.optimizer > 0 and "of host memory" in str(there)
    for free, refused in ((8 * there.offloaded, False), (8 * there.offloaded - 1, True)):
        monkeypatch.setattr("isthmus.platforms.base.free_bytes", lambda free=free: free)
        with pytest.raises(UsageError, match=r"puts .* into host memory") if refused else nullcontext():
            check_memory(plan, offload, Memory(str(2**50)), "bf16", ranks_here=8)
    pairs = estimate_memory(plan, plain.model_copy(update={"recipe": "dpo"}), "bf16")
    assert pairs.activations == 2 * here.activations and pairs.persistent == here.persistent


class Memory(CpuPlatform):
    """A machine of chosen size."""

    def memory_for_rank_bytes(self, ranks_here: int = 1) -> int:
        return int(self.reason) // ranks_here


def test_only_clearly_too_large_runs_are_refused() -> None:
    wide = {"micro_batch_size": 8}
    plan = plan_of(LLAMA_8B | {"num_hidden_layers": 2}, config(), ranks=1)
    needed = estimate_memory(plan, config(**wide), "bf16")

    def check(memory: float, layout: dict[str, Any] | None = None, world_size: int = 1, **train: Any) -> str:
        run = config(layout=layout, **wide, **train)
        where = replace(plan, parallel=run.parallel, world_size=world_size)
        return check_memory(where, run, Memory(str(int(memory))), "bf16", ranks_here=1)

    assert f"{needed.parameters:,} parameters" in check(2 * needed.total)
    assert check(needed.total / MARGIN + 1)
    with pytest.raises(UsageError, match=r"Lower train.micro_batch_size; or set train.recompute=full; or raise"):
        check(needed.total / MARGIN - 2)
    with pytest.raises(UsageError, match=r"has 1,486,901,248 parameters a rank, .* state 16\.6, .* Set parallel.fsdp"):
        check(needed.persistent - 1)
    with pytest.raises(UsageError, match=r"Raise parallel.tp or parallel.pp over more ranks; or use a smaller model"):
        check(1, {"pp": 2}, 2)
    with pytest.raises(UsageError, match=r"Start more ranks to shard it over; or use a smaller model"):
        check(1, {"fsdp": True}, 2)


def grpo_config(**sections: dict[str, Any]) -> RunConfig:
    values: dict[str, Any] = {
        "recipe": "grpo",
        "out": "o",
        "model": {"path": "m"},
        "data": {"files": ["d"], "seq_length": 2047},
        "rollout": {"reward": ["exact_match"], "batch_size": 16},
        "train": {"steps": 1, "global_batch_size": 512},
        "parallel": {"tp": 2},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return RunConfig.model_validate(values)


def test_states_of_generation_are_at_another_time_than_activations() -> None:
    run = grpo_config()
    result = estimate_memory(plan_of(LLAMA_8B, run), run, "bf16")
    layers, kv_heads, head_dim = 32, 8, 128
    assert result.states == 16 * 2048 * layers * 2 * kv_heads * head_dim * 2 // 2  # keys, values, bf16, tp=2
    training = result.activations + max(result.temporary, result.logits)
    assert result.total == result.persistent + max(result.states + result.packed, training) and result.reference == 0
    run = grpo_config(rollout={"batch_size": 256})
    assert estimate_memory(plan_of(LLAMA_8B, run), run, "bf16").states == 8 * result.states  # 128 answers a rank


@pytest.mark.parametrize("optim", [{}, {"optimizer": "adamw_8bit"}, {"offload": True}], ids=str)
def test_gradients_and_optimizer_state_are_absent_in_generation(optim: dict[str, Any]) -> None:
    stays, leaves = (
        grpo_config(rollout={"batch_size": 512, "offload": offload}, optim=optim) for offload in (False, True)
    )
    before, after = (
        estimate_memory(plan_of(LLAMA_8B, run), run, "bf16", gpu_bytes=80 << 30) for run in (stays, leaves)
    )
    state = before.gradients + before.optimizer
    assert after.training == before.training and after.generation == before.generation - state
    assert before.total == before.generation and after.total == max(after.training, after.generation) < before.total
    assert after.offloaded == before.offloaded + before.optimizer
    gib = f"{after.training / 2**30:,.1f} in training, {after.generation / 2**30:,.1f} in generation"
    assert gib in str(after)


def test_a_rollout_ahead_of_servers_has_a_copy_of_the_weights_that_generate() -> None:
    rollout = {"ahead": 1, "engine": "vllm", "batch_size": 64}
    run = grpo_config(rollout=rollout, grpo={"correction": "token", "kl_weight": 0.1})
    result = estimate_memory(plan_of(LLAMA_8B, run), run, "bf16")
    assert result.reference == 2 * 2 * result.parameters and result.states == 0


def test_rank_0_has_the_buckets_of_weights_that_servers_get_through_a_process_group() -> None:
    servers = {"engine": "vllm", "url": ["http://gpu1:8000"], "batch_size": 64}

    def exchanged(transfer: str, gpu_bytes: int | None) -> list[int]:
        run = grpo_config(rollout=servers | {"transfer": transfer}, parallel={"pp": 2})
        ranks = estimate_ranks(plan_of(LLAMA_8B, run), run, "bf16", gpu_bytes=gpu_bytes)
        assert all(rank.generation == rank.persistent + rank.states + rank.packed + rank.exchanged for rank in ranks)
        return [rank.exchanged for rank in ranks]

    buckets = [3 * 2**29, 0]
    assert exchanged("auto", 80 << 30) == exchanged("group", None) == buckets
    assert exchanged("auto", None) == exchanged("files", 80 << 30) == [0, 0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_generation_packs_the_weights_of_a_cpu(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = grpo_config()
    model = plan_of(LLAMA_8B, run)
    if precision == "bf16":
        monkeypatch.setattr(packed_weights, "has_bf16_matmuls", lambda: False)
        assert estimate_memory(model, run, "bf16").packed == 0
    monkeypatch.setattr(packed_weights, "has_bf16_matmuls", lambda: True)
    on_gpu, on_cpu = (estimate_memory(model, run, precision, gpu_bytes=size) for size in (80 * 2**30, None))
    assert on_cpu.packed == on_cpu.weights and on_gpu.packed == 0 and on_cpu.states == on_gpu.states
    assert on_cpu.generation - on_gpu.generation == on_cpu.packed
    run = grpo_config(rollout={"batch_size": 1}, parallel={"tp": 1})
    assert estimate_memory(plan_of(LLAMA_8B, run), run, "fp32").packed == 0


def test_a_reference_policy_is_a_copy_of_the_trained_weights() -> None:
    run = grpo_config(grpo={"kl_weight": 0.1})
    result = estimate_memory(plan_of(LLAMA_8B, run), run, "bf16")
    assert result.reference == 2 * result.parameters


def test_a_vllm_server_needs_memory_beside_a_run_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    started = {"engine": "vllm", "batch_size": 64}

    def check(**rollout: Any) -> str:
        run = grpo_config(rollout=started | rollout, parallel={"tp": 1}, data={"seq_length": 1024})
        plan = plan_of(LLAMA_8B | {"num_hidden_layers": 2}, run, ranks=1)
        return check_memory(plan, run, Memory(str(64 << 30)), "fp32", ranks_here=1)

    server = 4 * 1_486_901_248 / 2**30 + 1 + 1.5  # weights, cache, processes
    assert "states of sequences" not in check()
    assert f"memory of this machine without {server:.1f} GiB for the vLLM server is {64 - server:.1f} GiB" in check()
    assert "vLLM" not in check(url=["http://a:1"])
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "50")
    with pytest.raises(UsageError, match=r"without 57\.0 GiB for the vLLM server is 7\.0 GiB"):
        check()
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "much")
    with pytest.raises(UsageError, match="VLLM_CPU_KVCACHE_SPACE=much is no number of GiB"):
        check()
