"""fp16 and fp8 stay close to fp32; recomputation changes only memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ranks.rank_pool import RankPool
from ranks.test_layouts import max_relative_difference
from ranks.tiny import build_model_folder

STEPS = 8


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with matrix sizes that FP8 supports, also on two ranks."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    return build_model_folder(folder, "qwen3", intermediate_size=64, num_hidden_layers=2, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def alone(one_rank: RankPool, wide: Path, samples: Path) -> dict[str, dict[str, Any]]:
    """The single-process result of each precision."""
    cases: dict[str, dict[str, Any]] = {
        "fp32": {},
        "fp16": {"precision": "fp16", "more": {"initial_loss_scale": 256.0}},
        "fp16 too high": {"precision": "fp16", "more": {"initial_loss_scale": 2.0**16}, "steps": 10},
        "tensorwise": {"precision": "fp8"},
        "rowwise": {"precision": "fp8", "more": {"fp8_scaling": "rowwise", "fp8_format": "e4m3"}},
        "mxfp8": {"precision": "fp8", "more": {"fp8_scaling": "mxfp8", "fp8_format": "e4m3"}},
    }
    shared = {"task": "train", "model": wide, "samples": samples, "micro_batch_size": 2, "steps": STEPS}
    return dict(zip(cases, one_rank.run("ranks.tasks.run_cases", cases=list(cases.values()), **shared), strict=True))


@pytest.fixture(scope="module")
def layout_runs(two_ranks: RankPool, wide: Path, samples: Path) -> dict[str, dict[str, Any]]:
    """The same on two ranks."""
    cases: dict[str, dict[str, Any]] = {
        "fp16": {"precision": "fp16", "more": {"initial_loss_scale": 256.0}},
        "tensorwise": {"precision": "fp8", "sp": False},
        "tensorwise-sp": {"precision": "fp8"},
        "rowwise-sp": {"precision": "fp8", "more": {"fp8_scaling": "rowwise", "fp8_format": "e4m3"}},
    }
    shared = {"task": "train", "model": wide, "samples": samples, "micro_batch_size": 2, "steps": STEPS, "tp": 2}
    return dict(zip(cases, two_ranks.run("ranks.tasks.run_cases", cases=list(cases.values()), **shared), strict=True))


def differences(run: dict[str, Any], truth: dict[str, Any]) -> tuple[float, float]:
    """Largest relative differences of loss and gradient norm."""
    results = (
        max_relative_difference(run["loss"], truth["loss"]),
        max_relative_difference(run["grad_norm"], truth["grad_norm"]),
    )
    return results


def test_fp16_follows_fp32(alone: dict[str, dict[str, Any]], layout_runs: dict[str, dict[str, Any]]) -> None:
    for run in (alone["fp16"], layout_runs["fp16"]):
        assert set(run["skipped"]) == {0} and set(run["loss_scale"]) == {256}
        assert run["lr"] == alone["fp32"]["lr"]
        loss, norm = differences(run, alone["fp32"])
        # 11 bits of mantissa; the limits for bfloat16 with 8 bits are 0.003 and 0.02.
        assert loss < 0.0005 and norm < 0.004


def test_too_high_loss_scale_is_lowered(alone: dict[str, dict[str, Any]]) -> None:
    run = alone["fp16 too high"]
    assert 2 <= run["skipped"][-1] < 10
    assert run["loss_scale"][-1] <= 2.0 ** (17 - run["skipped"][-1])
    assert run["loss"][-1] != run["loss"][0] and run["grad_norm"][-1] < 100


def test_overflow_skips_a_step_halves_the_scale_and_is_checkpointed(
    two_ranks: RankPool, wide: Path, samples: Path, alone: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Two data-parallel ranks, one with the overflow; the scale grows after three steps without overflow."""
    settings = {
        "model": wide,
        "samples": samples,
        "micro_batch_size": 2,
        "steps": STEPS,
        "precision": "fp16",
        "more": {"initial_loss_scale": 256.0, "loss_scale_window": 3},
        "overflow_at": [0, 3],
    }
    run = two_ranks.run("ranks.tasks.train", **settings, save_at=[5], root=tmp_path)
    assert run["loss_scale"] == [256, 128, 128, 128, 64, 64, 64, 128]
    assert run["skipped"] == [1, 1, 1, 2, 2, 2, 2, 2]
    assert [step for step, norm in enumerate(run["grad_norm"]) if norm == float("inf")] == [0, 3]
    updated = [step for step in range(STEPS) if step not in (0, 3)]
    assert [run["lr"][step] for step in updated] == alone["fp32"]["lr"][: len(updated)]
    assert run["lr"][0] == run["lr"][1] and run["lr"][3] == run["lr"][4]
    again = two_ranks.run("ranks.tasks.train", **settings, resume=tmp_path / "iter_0000005")
    assert again["digest"] == run["digest"]
    for name in ("loss", "grad_norm", "lr", "loss_scale", "skipped"):
        assert again[name] == run[name][5:]


def test_overflow_at_the_lowest_scale_fails(one_rank: RankPool, wide: Path, samples: Path) -> None:
    settings = {"model": wide, "samples": samples, "precision": "fp16", "steps": 2}
    more = {"initial_loss_scale": 2.0}
    refused = one_rank.run("ranks.tasks.refusal", task="train", **settings, more=more, overflow_at=[0, 1])
    assert refused["code"] == 79 and "the gradient norm is inf" in refused["text"]


def test_gradient_that_is_not_finite_leaves_the_weights(
    two_ranks: RankPool, models: dict[str, Path], samples: Path
) -> None:
    results = two_ranks.run("ranks.tasks.diverged_step", model=models["qwen3-tied"], samples=samples)
    assert results["unchanged"] and re.search(r"the gradient norm is (inf|nan) at a loss of \d", results["text"])


def test_fp8_follows_fp32(alone: dict[str, dict[str, Any]], layout_runs: dict[str, dict[str, Any]]) -> None:
    for run in (
        alone["tensorwise"],
        alone["rowwise"],
        alone["mxfp8"],
        *(layout_runs[name] for name in layout_runs if "wise" in name),
    ):
        loss, norm = differences(run, alone["fp32"])
        # 4 bits of mantissa forward and 3 backward, in sums over 32 to 64 numbers.
        assert 0 < loss < 0.01 and norm < 0.1
    losses = [alone[name]["loss"] for name in ("tensorwise", "rowwise", "mxfp8")]
    assert all(losses.count(curve) == 1 for curve in losses)
    # The same matrices per rank, until rounding to bfloat16 in another order moves an element to the next FP8 number.
    first = (
        {curve: layout_runs[name][curve][:2] for curve in ("loss", "grad_norm")}
        for name in ("tensorwise-sp", "tensorwise")
    )
    assert max(differences(*first)) < 1e-4


def test_shapes_unsuited_to_fp8_are_refused(two_ranks: RankPool, models: dict[str, Path], samples: Path) -> None:
    messages = two_ranks.run(
        "ranks.tasks.build_messages", model=models["qwen3-tied"], samples=samples, precision="fp8", tp=2
    )
    assert messages == [
        "fp8: 6 linear layers of this rank",
        "fp8: linear_fc2 stays bf16, 32 x 24 on a rank is no multiple of 16 both ways",
    ]


BLOCKWISE: dict[str, Any] = {"precision": "fp8", "more": {"fp8_scaling": "blockwise", "fp8_format": "e4m3"}}


def test_blockwise_fp8_follows_bf16(one_rank: RankPool, samples: Path, tmp_path: Path) -> None:
    """Of a model whose widths are multiples of 128."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 2}
    model = build_model_folder(tmp_path / "model", "qwen3", **sizes)
    shared: dict[str, Any] = {"task": "train", "model": model, "samples": samples, "micro_batch_size": 2, "steps": 4}
    cases: list[dict[str, Any]] = [{"precision": "bf16"}, BLOCKWISE]
    bf16, fp8 = one_rank.run("ranks.tasks.run_cases", cases=cases, **shared)
    loss, norm = differences(fp8, bf16)
    print(f"blockwise: {loss:.4f} in loss, {norm:.4f} in gradient norm")
    assert 0 < loss < 0.01 and norm < 0.1


@pytest.mark.thorough
def test_blockwise_fp8_on_two_ranks(one_rank: RankPool, two_ranks: RankPool, samples: Path, tmp_path: Path) -> None:
    """Data- and expert-parallel ranks quantize the blocks of one process; tensor-parallel ones sum in another order."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    dense = build_model_folder(tmp_path / "dense", "qwen3", **sizes)
    experts = build_model_folder(tmp_path / "experts", "qwen2_moe", **sizes, shared_expert_intermediate_size=128)
    shared: dict[str, Any] = {"task": "train", "samples": samples, "micro_batch_size": 2, "steps": 2}
    alone = one_rank.run("ranks.tasks.run_cases", cases=[{"model": m} | BLOCKWISE for m in (dense, experts)], **shared)
    layouts: list[dict[str, Any]] = [{"model": dense, "tp": 2}, {"model": dense}, {"model": experts, "ep": 2}]
    runs = two_ranks.run("ranks.tasks.run_cases", cases=[layout | BLOCKWISE for layout in layouts], **shared)
    tensor, data, expert = (differences(run, alone[number]) for run, number in zip(runs, (0, 0, 1), strict=True))
    assert max(tensor) < 0.01  # as much as bf16 and FP8 differ
    assert data == (0, 0) and max(expert) < 1e-3


RECOMPUTED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("qwen3", "selective", {"recompute_modules": ["core_attn", "mlp"]}),
    ("qwen3", "selective", {"recompute_modules": ["layernorm", "mlp_act", "rope"]}),
    ("qwen3", "full", {"recompute_layers": 1}),
    ("gemma2", "selective", {"recompute_modules": ["mlp"]}),
    ("gemma2", "selective", {"recompute_modules": ["mlp", "layernorm"]}),
    ("qwen2_moe", "selective", {"recompute_modules": ["moe"]}),
    ("qwen2_moe", "selective", {"recompute_modules": ["core_attn", "layernorm", "moe_act", "rope"]}),
)


def test_recompute_gives_identical_results(one_rank: RankPool, samples: Path, tmp_path: Path) -> None:
    families = sorted({family for family, *_ in RECOMPUTED})
    models = {family: build_model_folder(tmp_path / family, family, num_hidden_layers=2) for family in families}
    cases: list[dict[str, Any]] = [{"model": models[family]} for family in families]
    cases += [{"model": models[family], "recompute": how, "more": more} for family, how, more in RECOMPUTED]
    shared = {"task": "train", "samples": samples, "micro_batch_size": 2, "steps": 2}
    runs = one_rank.run("ranks.tasks.run_cases", cases=cases, **shared)
    plain = dict(zip(families, runs, strict=False))
    for (family, *_), run in zip(RECOMPUTED, runs[len(families) :], strict=True):
        assert run == plain[family]


def test_recomputed_experts_use_their_own_sequence(
    one_rank: RankPool, two_ranks: RankPool, samples: Path, tmp_path: Path
) -> None:
    """The first stage recomputes experts while a later micro batch is already in its forward pass."""
    model = build_model_folder(tmp_path / "model", "qwen2_moe", num_hidden_layers=2)
    run: dict[str, Any] = {"model": model, "samples": samples, "micro_batch_size": 2, "steps": 2}
    run |= {"moe": {"aux_loss": 0.05}, "packing": False}
    truth = one_rank.run("ranks.tasks.train", **run)
    again = two_ranks.run(
        "ranks.tasks.train", **run, pp=2, recompute="selective", more={"recompute_modules": ["core_attn", "moe"]}
    )
    assert max(max_relative_difference(again[curve], truth[curve]) for curve in ("loss", "grad_norm")) < 1e-5
    for got, expected in zip(again["load"], truth["load"], strict=True):
        assert got == pytest.approx(expected, rel=1e-5)


def test_fp8_experts_follow_bf16_ones(one_rank: RankPool, two_ranks: RankPool, samples: Path, tmp_path: Path) -> None:
    """Emulated; a scale for each token and output does not depend on the ranks of the experts."""
    sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    model = build_model_folder(tmp_path / "model", "qwen3_moe", **sizes)
    shared: dict[str, Any] = {"model": model, "samples": samples, "micro_batch_size": 2, "steps": 4, "precision": "fp8"}
    cases = [{}, {"more": {"fp8_experts": True}}]
    bf16, fp8 = one_rank.run("ranks.tasks.run_cases", task="train", cases=cases, **shared)
    sharded = two_ranks.run("ranks.tasks.train", **shared, more={"fp8_experts": True}, ep=2)
    loss, norm = differences(fp8, bf16)
    assert 0 < loss < 0.01 and norm < 0.1
    loss, norm = differences(sharded, fp8)
    assert loss < 0.005 and norm < 0.05


RECOMPUTE_MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "core_attn": {"recompute": "selective"},
    "mlp": {"recompute": "selective", "more": {"recompute_modules": ["core_attn", "mlp"]}},
    "norms": {"recompute": "selective", "more": {"recompute_modules": ["layernorm"]}},
    "activations": {"recompute": "selective", "more": {"recompute_modules": ["mlp_act"]}},
    "rope": {"recompute": "selective", "more": {"recompute_modules": ["rope"]}},
    "without matmuls": {"recompute": "selective", "more": {"recompute_modules": ["layernorm", "mlp_act", "rope"]}},
    "one layer": {"recompute": "full", "more": {"recompute_layers": 1}},
    "all layers": {"recompute": "full"},
}


def assert_formula(saved: dict[str, int], case: str) -> None:
    """The formula omits less than 1%: float32 norm weights and position embeddings."""
    assert saved["measured"] == pytest.approx(saved["expected"], rel=0.01), case


def test_activation_formula_for_each_recompute_mode(one_rank: RankPool, wide: Path, samples: Path) -> None:
    shared = {"task": "saved_activations", "model": wide, "samples": samples, "micro_batch_size": 4}
    cases = one_rank.run("ranks.tasks.run_cases", cases=list(RECOMPUTE_MODES.values()), **shared)
    for mode, saved in zip(RECOMPUTE_MODES, cases, strict=True):
        assert_formula(saved, mode)
    nothing, core_attn, mlp, norms, activations, rope, elementwise, one_layer, all_layers = (
        saved["measured"] for saved in cases
    )
    assert nothing == core_attn > mlp > one_layer > all_layers
    assert nothing - elementwise == sum(nothing - alone for alone in (norms, activations, rope))
    assert elementwise < 0.75 * nothing


def test_activation_formula_for_layer_types(one_rank: RankPool, samples: Path, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "vocab_size": 77}
    families = ("llama", "gpt2", "gemma2", "olmo2", "cohere", "gpt_neox", "nemotron", "hunyuan_v1_dense")
    cases = [{"model": build_model_folder(tmp_path / family, family, **sizes)} for family in families]
    shared = {"task": "saved_activations", "samples": samples, "micro_batch_size": 4}
    for family, saved in zip(families, one_rank.run("ranks.tasks.run_cases", cases=cases, **shared), strict=True):
        assert_formula(saved, family)


def test_activation_formula_over_ranks(two_ranks: RankPool, wide: Path, samples: Path) -> None:
    shared = {"model": wide, "samples": samples, "micro_batch_size": 4, "precision": "bf16", "tp": 2}
    cases = [{"sp": False}, {"sp": True}]
    results = two_ranks.run("ranks.tasks.run_cases", task="saved_activations", cases=cases, **shared)
    for layout, saved in zip(("tp2", "tp2-sp"), results, strict=True):
        assert_formula(saved, layout)
