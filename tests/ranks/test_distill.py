"""Distillation in every layout equals distillation in one process, and resumed runs are bitwise identical."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ranks.rank_pool import RankPool
from ranks.test_layouts import TOLERANCE, assert_same, max_relative_difference
from ranks.tiny import VALID_SAMPLES, VOCAB, build_model_folder, open_samples

TRAIN = "ranks.tasks.train"
SHARED = {"micro_batch_size": 2, "steps": 4, "evaluate": True}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Wider, deeper, and of other families than the student; one with more tokens, the other with fewer."""
    root = tmp_path_factory.mktemp("teachers")
    sizes: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 3, "vocab_size": VOCAB + 4}
    llama = build_model_folder(root / "llama", "llama", tie_word_embeddings=False, **sizes)
    fewer: dict[str, Any] = {"num_hidden_layers": 4, "vocab_size": VOCAB - 1, "final_logit_softcapping": 4.0}
    gemma = build_model_folder(root / "gemma2", "gemma2", **fewer)
    experts = build_model_folder(root / "experts", "qwen3_moe", num_hidden_layers=2)
    return {"llama": str(llama), "gemma2": str(gemma), "experts": str(experts)}


@pytest.fixture(scope="module")
def run(models: dict[str, Path], samples: Path, teachers: dict[str, str]) -> dict[str, Any]:
    distill = {"teacher": teachers["llama"], "beta": 0.5, "temperature": 2.0, "sft_weight": 0.1}
    return {"model": models["qwen3-tied"], "samples": samples, "distill": distill, **SHARED}


@pytest.fixture(scope="module")
def alone(one_rank: RankPool, run: dict[str, Any]) -> dict[str, Any]:
    return dict(one_rank.run(TRAIN, **run))


@pytest.mark.thorough_cases("fsdp2", "cp2", "dp2")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(2, {"tp": 2, "sp": True}, id="tp2-sp"),
        pytest.param(2, {"pp": 2}, id="pp2"),
        pytest.param(2, {}, id="dp2"),
        pytest.param(2, {"fsdp": True}, id="fsdp2"),
        pytest.param(2, {"cp": 2}, id="cp2"),
    ],
)
def test_layout_trains_as_single_process(
    ranks: int, layout: dict[str, Any], worlds: dict[int, RankPool], run: dict[str, Any], alone: dict[str, Any]
) -> None:
    result = worlds[ranks].run(TRAIN, **run | layout)
    assert_same(result, alone)
    for name in ("distill_loss", "sft_loss"):
        curves = [[step[name] for step in item["metrics"]] for item in (result, alone)]
        assert max_relative_difference(*curves) < TOLERANCE


@pytest.mark.thorough
def test_a_teacher_with_fewer_tokens_and_a_softcap(
    one_rank: RankPool, two_ranks: RankPool, run: dict[str, Any], models: dict[str, Path], teachers: dict[str, str]
) -> None:
    """Virtual stages, top k, and bfloat16 for the teacher only, whose sums over ranks are rounded differently."""
    run = run | {"distill": {"teacher": teachers["gemma2"], "top_k": 9}, "steps": 2, "model": models["four-layers"]}
    alone = one_rank.run(TRAIN, **run)
    assert_same(two_ranks.run(TRAIN, **run | {"pp": 2, "vpp": 2}), alone)
    run["distill"]["teacher_dtype"] = "bfloat16"
    rounded = two_ranks.run(TRAIN, **run | {"tp": 2})
    assert 1e-6 < max_relative_difference(rounded["loss"], alone["loss"]) < 0.02


def test_experts_of_student_and_teacher(
    one_rank: RankPool, two_ranks: RankPool, run: dict[str, Any], teachers: dict[str, str], tmp_path: Path
) -> None:
    """The layout of a dense teacher has no expert parallelism."""
    student = build_model_folder(tmp_path / "student", "qwen2_moe", num_hidden_layers=2)
    for teacher in ("experts", "llama"):
        case = run | {"model": student, "steps": 2, "distill": {"teacher": teachers[teacher]}}
        assert_same(two_ranks.run(TRAIN, **case | {"ep": 2}), one_rank.run(TRAIN, **case))


def test_adapters_of_the_student(one_rank: RankPool, two_ranks: RankPool, run: dict[str, Any]) -> None:
    """The teacher has none, and its weights are not quantized."""
    distill = {"teacher": run["model"]}
    case = run | {"steps": 2, "distill": distill, "lora": {"rank": 4, "quantize": "int8"}}
    alone = one_rank.run(TRAIN, **case)
    assert 1e-7 < alone["valid_before"] < 0.1  # of the same weights, without and with quantization
    assert_same(two_ranks.run(TRAIN, **case | {"pp": 2}), alone)


def test_resumes_bitwise(one_rank: RankPool, run: dict[str, Any], tmp_path: Path) -> None:
    run = run | {"precision": "bf16", "evaluate": False}
    uninterrupted = one_rank.run(TRAIN, **run, save_at=[2], root=tmp_path)
    resumed = one_rank.run(TRAIN, **run, resume=tmp_path / "iter_0000002")
    assert resumed["digest"] == uninterrupted["digest"]
    assert resumed["loss"] == uninterrupted["loss"][2:]


def test_the_loss_is_that_of_transformers(
    one_rank: RankPool, run: dict[str, Any], models: dict[str, Path], teachers: dict[str, str]
) -> None:
    """The validation loss before training, from both models' logits."""
    folders = (models["qwen3-tied"], teachers["llama"])
    networks = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders]
    results = one_rank.run(TRAIN, **run | {"steps": 0, "distill": {"teacher": teachers["llama"]}})
    total, count = 0.0, 0
    store = open_samples(run["samples"])
    for number in range(VALID_SAMPLES):
        tokens, mask = (torch.tensor(entry) for entry in store[number])
        with torch.no_grad():
            log_probs = [net(tokens[None].long()).logits[0, :-1, :VOCAB].log_softmax(-1) for net in networks]
        divergence = torch.nn.functional.kl_div(*log_probs, reduction="none", log_target=True).sum(-1)
        total, count = total + divergence[mask[1:].bool()].sum().item(), count + int(mask[1:].sum())
    assert results["valid_before"] == pytest.approx(total / count, rel=1e-5)
