"""MTP layers (DeepSeek-V3): training as in the paper, in every layout, and exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from isthmus.convert.transfer import convert
from isthmus.convert.verify.compare import compare_models
from ranks.rank_pool import RankPool
from ranks.test_layouts import CURVES, TOLERANCE, max_relative_difference
from ranks.tiny import add_mtp_layers, build_model_folder

STEPS = 4
ALL = (*CURVES, "mtp_loss")
WEIGHT = 0.7
"""Large enough that a wrong gradient of these layers changes the norm."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers and two MTP depths."""
    folder = tmp_path_factory.mktemp("mtp") / "model"
    return add_mtp_layers(build_model_folder(folder, "deepseek_v3", num_hidden_layers=2, num_mtp_layers=2))


@pytest.fixture(scope="module")
def alone(model: Path, one_rank: RankPool, samples: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The single-process result, with a checkpoint of step 2."""
    root = tmp_path_factory.mktemp("alone")
    settings = {"model": model, "samples": samples, "micro_batch_size": 2, "steps": STEPS, "evaluate": True}
    saves = {"save_at": [2], "root": root}
    run: dict[str, Any] = one_rank.run("ranks.tasks.train", **settings, mtp_loss_weight=WEIGHT, **saves)
    return run | {"saved": root / "iter_0000002"}


def test_mtp_loss_equals_the_paper(model: Path, alone: dict[str, Any], one_rank: RankPool, samples: Path) -> None:
    settings = {"model": model, "samples": samples, "lr": alone["lr"], "mtp_loss_weight": WEIGHT}
    theirs = one_rank.run("parity.mtp.train", **settings)
    differences = {curve: max_relative_difference(alone[curve], theirs[curve]) for curve in ALL}
    assert max(differences.values()) < TOLERANCE


@pytest.mark.thorough_cases("tp2-sp-pp2")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(2, {"tp": 2, "sp": False}, id="tp2"),
        pytest.param(2, {"pp": 2, "recompute": "full"}, id="pp2-recomputed"),
        pytest.param(4, {"tp": 2, "pp": 2}, id="tp2-sp-pp2"),
    ],
)
def test_mtp_in_every_layout(
    ranks: int, layout: dict[str, Any], model: Path, alone: dict[str, Any], worlds: dict[int, RankPool], samples: Path
) -> None:
    settings = {"model": model, "samples": samples, "micro_batch_size": 2, "steps": STEPS, "evaluate": True}
    run = worlds[ranks].run("ranks.tasks.train", **settings, mtp_loss_weight=WEIGHT, **layout)
    differences = {curve: max_relative_difference(run[curve], alone[curve]) for curve in ALL}
    assert max(differences.values()) < TOLERANCE
    assert run["valid_after"] == pytest.approx(alone["valid_after"], rel=TOLERANCE)


@pytest.mark.parametrize("layout", [{"pp": 2}, pytest.param({"tp": 2}, marks=pytest.mark.thorough)], ids=str)
def test_layers_without_copies_in_files(
    layout: dict[str, int], one_rank: RankPool, two_ranks: RankPool, samples: Path, tmp_path: Path
) -> None:
    built = build_model_folder(tmp_path / "model", "bailing_moe", num_hidden_layers=2, num_nextn_predict_layers=1)
    settings = {"model": add_mtp_layers(built), "samples": samples, "mtp_loss_weight": WEIGHT}
    run = two_ranks.run("ranks.tasks.train", **settings, micro_batch_size=2, steps=STEPS, **layout)
    theirs = one_rank.run("parity.mtp.train", **settings, lr=run["lr"])
    differences = {curve: max_relative_difference(run[curve], theirs[curve]) for curve in ALL}
    assert max(differences.values()) < TOLERANCE
    two_ranks.run("ranks.tasks.export", model=built, destination=tmp_path / "export", **layout)
    assert (tmp_path / "export" / "model.safetensors").read_bytes() == (built / "model.safetensors").read_bytes()


@pytest.mark.thorough_cases("{'tp': 2, 'pp': 2}")
@pytest.mark.parametrize("layout", [{"pp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_one_tied_embedding_for_lookups_and_both_heads(
    layout: dict[str, Any], one_rank: RankPool, worlds: dict[int, RankPool], samples: Path, tmp_path: Path
) -> None:
    """The last stage has one copy of the embedding for MTP layers and output layer, whose gradient has three terms."""
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_mtp_layers": 1, "tie_word_embeddings": True}
    model = add_mtp_layers(build_model_folder(tmp_path / "model", "deepseek_v3", **sizes))
    settings = {"model": model, "samples": samples, "micro_batch_size": 2, "steps": STEPS, "mtp_loss_weight": WEIGHT}
    alone = one_rank.run("ranks.tasks.train", **settings, evaluate=True)
    world = worlds[layout.get("tp", 1) * layout["pp"]]
    split = world.run("ranks.tasks.train", **settings, **layout, evaluate=True, save_at=[2], root=tmp_path / "root")
    differences = {curve: max_relative_difference(split[curve], alone[curve]) for curve in ALL}
    assert max(differences.values()) < TOLERANCE
    assert split["valid_after"] == pytest.approx(alone["valid_after"], rel=TOLERANCE)
    rest = one_rank.run("ranks.tasks.train", **settings, resume=tmp_path / "root" / "iter_0000002")
    assert max(max_relative_difference(rest[curve], alone[curve][2:]) for curve in ALL) < TOLERANCE


@pytest.mark.thorough
def test_mtp_resumes_from_virtual_pipeline(
    one_rank: RankPool, two_ranks: RankPool, samples: Path, tmp_path: Path
) -> None:
    deeper = build_model_folder(tmp_path / "model", "deepseek_v3", num_hidden_layers=4, num_mtp_layers=1)
    settings = {"model": add_mtp_layers(deeper), "samples": samples, "micro_batch_size": 2, "steps": STEPS}
    full = two_ranks.run("ranks.tasks.train", **settings, pp=2, vpp=2, save_at=[2], root=tmp_path / "root")
    rest = one_rank.run("ranks.tasks.train", **settings, resume=tmp_path / "root" / "iter_0000002")
    assert max(max_relative_difference(rest[curve], full[curve][2:]) for curve in ALL) < TOLERANCE


def test_mtp_single_process_checkpoint_resumes_in_pipeline(
    model: Path, alone: dict[str, Any], two_ranks: RankPool, samples: Path
) -> None:
    settings = {"model": model, "samples": samples, "micro_batch_size": 2, "steps": STEPS, "pp": 2}
    rest = two_ranks.run("ranks.tasks.train", **settings, mtp_loss_weight=WEIGHT, resume=alone["saved"])
    assert max(max_relative_difference(rest[curve], alone[curve][2:]) for curve in ALL) < TOLERANCE


def test_export_contains_mtp_layers(model: Path, four_ranks: RankPool, samples: Path, tmp_path: Path) -> None:
    settings = {"model": model, "samples": samples, "micro_batch_size": 2, "tp": 2, "pp": 2}
    places = {"root": tmp_path / "checkpoints", "destination": tmp_path / "export"}
    four_ranks.run("ranks.tasks.save_and_export", **settings, **places)
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "export"))
    assert before.keys() == after.keys()
    trained = [name for name in before if not name.endswith("e_score_correction_bias")]
    assert not any(torch.equal(before[name], after[name]) for name in trained)
    assert torch.equal(after["model.layers.3.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert torch.equal(after["model.layers.2.shared_head.head.weight"], after["lm_head.weight"])
    assert json.loads((tmp_path / "export" / "config.json").read_text())["num_nextn_predict_layers"] == 2
    convert(tmp_path / "checkpoints", tmp_path / "converted", hf_like=model)
    compare_models(tmp_path / "export", tmp_path / "converted")


def test_separate_mtp_embedding_is_refused(two_ranks: RankPool, model: Path, samples: Path, tmp_path: Path) -> None:
    other = add_mtp_layers(build_model_folder(tmp_path / "model", "deepseek_v3", num_hidden_layers=2, num_mtp_layers=1))
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.2.embed_tokens.weight"][7] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    refused = two_ranks.run("ranks.tasks.refusal", task="train", model=other, samples=samples, pp=2)
    assert (refused["kind"], refused["code"]) == ("UsageError", 2)
    assert "model.layers.2.embed_tokens.weight differs from the model's own tensor" in refused["text"]


@pytest.mark.thorough_cases("hy_v3", "mimo", "nemotron_h")
@pytest.mark.parametrize("family", ["mimo", "hy_v3", "nemotron_h"])
def test_layers_of_other_families_in_layouts(
    family: str, one_rank: RankPool, worlds: dict[int, RankPool], samples: Path, tmp_path: Path
) -> None:
    settings = {"num_nextn_predict_layers": 1} if family == "mimo" else {}
    folder = build_model_folder(tmp_path / "model", family, **settings)
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    model = folder if family == "mimo" else add_mtp_layers(folder)
    shared = {"model": model, "samples": samples, "micro_batch_size": 2, "steps": STEPS, "mtp_loss_weight": WEIGHT}
    alone = one_rank.run("ranks.tasks.train", **shared)
    layouts: list[dict[str, Any]] = [{"tp": 2}, {"pp": 2}, *([] if family == "mimo" else [{"ep": 2}])]
    for layout in layouts:
        run = worlds[2].run("ranks.tasks.train", **shared, **layout)
        differences = {curve: max_relative_difference(run[curve], alone[curve]) for curve in ALL}
        assert max(differences.values()) < TOLERANCE
    if family == "mimo":  # the hidden state comes first in the inputs of the layer
        theirs = one_rank.run("parity.mtp.train", model=model, samples=samples, lr=alone["lr"], mtp_loss_weight=WEIGHT)
        assert max(max_relative_difference(alone[curve], theirs[curve]) for curve in ALL) < TOLERANCE
