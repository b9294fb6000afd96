"""What a run says about a step that is not finite or has a spike, in every kind of layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks.rank_pool import RankPool
from ranks.tiny import build_answers, build_model_folder, build_pairs

FIND, TRAIN = "ranks.explain_tasks.first_nonfinite", "ranks.explain_tasks.train_with_sample_losses"
MLP = "decoder.layers.1.mlp"


@pytest.fixture(scope="module")
def run(models: dict[str, Path], samples: Path) -> dict[str, Any]:
    return {"model": models["qwen3-tied"], "samples": samples}


@pytest.mark.thorough_cases("pp2", "cp2", "dp2", "fsdp2", "pp2-recompute")
@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        pytest.param({"micro_batch_size": 2}, 0, id="dp2"),
        pytest.param({"tp": 2, "sp": True, "micro_batch_size": 2}, None, id="tp2-sp"),
        pytest.param({"pp": 2}, 1, id="pp2"),
        pytest.param({"pp": 2, "recompute": "full"}, 1, id="pp2-recompute"),
        pytest.param({"cp": 2, "micro_batch_size": 2}, None, id="cp2"),
        pytest.param({"fsdp": True, "micro_batch_size": 2}, 0, id="fsdp2"),
    ],
)
def test_the_first_tensor_and_its_sample(
    layout: dict[str, Any], rank: int | None, two_ranks: RankPool, run: dict[str, Any]
) -> None:
    """``rank`` None: the ranks share the sample."""
    result = two_ranks.run(FIND, **run, **layout, where=MLP, kind="output")
    kind, name, found_rank, outcome = result["findings"][0]
    assert (kind, name, outcome) == ("output", MLP, [result["sample"]])
    assert rank is None or found_rank == rank
    assert result["sample"] in result["losses"]  # attention may carry NaN into other samples, as zero times NaN
    if "recompute" not in layout:  # with it, gradients are those of a micro batch that is not known
        result = two_ranks.run(FIND, **run, **layout, where=MLP, kind="output gradient")
        kind, name, found_rank, outcome = result["findings"][0]
        assert (kind, name) == ("output gradient", MLP) and not result["losses"]
        assert outcome in ([result["sample"]], []) if "pp" in layout else outcome == [result["sample"]]


@pytest.mark.thorough
def test_weights_and_their_gradients(two_ranks: RankPool, run: dict[str, Any]) -> None:
    weight = "decoder.layers.1.self_attention.linear_qkv.weight"
    result = two_ranks.run(FIND, **run, pp=2, where=weight, kind="weight")
    assert result["findings"][0][:3] == ["weight", weight, 1]
    result = two_ranks.run(FIND, **run, where="", kind="weight gradient")
    assert [item[0] for item in result["findings"]] == ["weight gradient"] and not result["losses"]
    clean = two_ranks.run(FIND, **run, tp=2, where="", kind="none")
    assert clean["findings"] == [] == clean["losses"]


@pytest.mark.thorough_cases("cp2", "fsdp2-bf16", "pp2-recompute", "tp2-sp-dropout")
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        pytest.param({"tp": 2, "sp": True, "more": {"hidden_dropout": 0.2}}, 2, id="tp2-sp-dropout"),
        pytest.param({"pp": 2, "recompute": "full"}, 2, id="pp2-recompute"),
        pytest.param({"cp": 2, "micro_batch_size": 4}, 2, id="cp2"),
        pytest.param({"fsdp": True, "precision": "bf16"}, 2, id="fsdp2-bf16"),
        pytest.param({"overlap_grad_reduce": True, "overlap_param_gather": True}, 2, id="dp2-overlap"),
    ],
)
def test_losses_of_samples_add_up_and_change_nothing(
    layout: dict[str, Any], ranks: int, two_ranks: RankPool, run: dict[str, Any]
) -> None:
    check(two_ranks, run | layout)


def check(world: RankPool, case: dict[str, Any]) -> None:
    measured, plain = (world.run(TRAIN, **case, measures=measures) for measures in (True, False))
    assert measured["digest"] == plain["digest"] and measured["loss"] == plain["loss"]
    assert measured["mean"] == pytest.approx(plain["loss"], rel=2e-3 if case.get("precision") == "bf16" else 1e-5)
    assert all(ours == theirs for ours, theirs in measured["loss_tokens"])


@pytest.mark.thorough
def test_losses_of_pairs_answers_and_experts(two_ranks: RankPool, run: dict[str, Any], tmp_path: Path) -> None:
    pairs, answers = build_pairs(tmp_path / "pairs"), build_answers(tmp_path / "answers")
    check(two_ranks, run | {"samples": pairs, "dpo": {"beta": 0.3, "length_normalized": True}, "cp": 2})
    check(two_ranks, run | {"samples": answers, "kto": {"beta": 0.3}})
    experts = build_model_folder(tmp_path / "model", "qwen2_moe", num_hidden_layers=2)
    check(two_ranks, run | {"model": experts, "ep": 2, "moe": {"aux_loss": 0.01}})
