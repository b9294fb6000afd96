"""Reward models in every layout equal those of one process, resume bitwise, and load in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from isthmus.convert.transfer import convert
from isthmus.errors import UsageError
from ranks.rank_pool import RankPool
from ranks.test_layouts import assert_same
from ranks.tiny import build_model_folder, build_pairs

TRAIN, SAVE = "ranks.tasks.train", "ranks.tasks.save_and_export"
REWARD = {"center_rewards_coefficient": 0.1}


@pytest.fixture(scope="module")
def run(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    samples = build_pairs(tmp_path_factory.mktemp("pairs") / "store", margins=True)
    return {"model": models["qwen3-tied"], "samples": samples, "reward": REWARD, "micro_batch_size": 2}


@pytest.fixture(scope="module")
def alone(one_rank: RankPool, run: dict[str, Any]) -> dict[str, Any]:
    return dict(one_rank.run(TRAIN, **run, steps=4, evaluate=True))


@pytest.mark.thorough_cases("cp2", "micro-batch-4-unpacked", "tp2", "fsdp2", "pp2-vpp2-dp2")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, {"micro_batch_size": 4, "packing": False}, id="micro-batch-4-unpacked"),
        pytest.param(2, {"tp": 2}, id="tp2"),
        pytest.param(2, {"tp": 2, "sp": True}, id="tp2-sp"),
        pytest.param(2, {"fsdp": True}, id="fsdp2"),
        pytest.param(2, {"cp": 2}, id="cp2"),
        pytest.param(4, {"pp": 2}, id="pp2-dp2"),
        pytest.param(4, {"pp": 2, "vpp": 2}, id="pp2-vpp2-dp2"),
    ],
)
def test_layout_trains_as_single_process(
    ranks: int,
    layout: dict[str, Any],
    worlds: dict[int, RankPool],
    models: dict[str, Path],
    run: dict[str, Any],
    alone: dict[str, Any],
) -> None:
    if "vpp" in layout:
        run = run | {"model": models["four-layers"]}
        alone = worlds[1].run(TRAIN, **run, steps=4, evaluate=True)
    result = worlds[ranks].run(TRAIN, **run | layout, steps=4, evaluate=True)
    assert_same(result, alone)
    assert alone["valid_after"] < alone["valid_before"]


def test_experts(one_rank: RankPool, two_ranks: RankPool, run: dict[str, Any], tmp_path: Path) -> None:
    case = run | {"model": build_model_folder(tmp_path / "model", "qwen3_moe", num_hidden_layers=2)}
    case |= {"steps": 2, "evaluate": True}
    assert_same(two_ranks.run(TRAIN, **case, ep=2), one_rank.run(TRAIN, **case))


def test_adapters_and_score_head(one_rank: RankPool, two_ranks: RankPool, run: dict[str, Any], tmp_path: Path) -> None:
    """Trained like in one process; PEFT and a second run compute the scores of the merged model."""
    case = run | {"lora": {"rank": 4, "targets": ["q_proj", "down_proj"]}, "steps": 4, "evaluate": True}
    alone = one_rank.run(TRAIN, **case, exports=tmp_path, save_at=[2], root=tmp_path)
    assert_same(two_ranks.run(TRAIN, **case, tp=2, sp=True), alone)
    assert_same(two_ranks.run(TRAIN, **case, pp=2), alone)
    resumed = one_rank.run(TRAIN, **case, resume=tmp_path / "iter_0000002")
    assert resumed["digest"] == alone["digest"] and resumed["loss"] == alone["loss"][2:]

    adapter, merged = tmp_path / "adapter", load_file(tmp_path / "hf/model.safetensors")
    before, after = (load_file(tmp_path / at / "adapter_model.safetensors") for at in ("before", "adapter"))
    score = "base_model.model.score.weight"
    assert (before[score] - after[score]).abs().max() > 1e-3 and len(after) == 2 * 2 * 2 + 1
    peft = pytest.importorskip("peft", minversion="0.21", reason="PEFT is not installed (extra: bench)")
    base = AutoModelForSequenceClassification.from_pretrained(run["model"], num_labels=1)
    theirs = peft.PeftModel.from_pretrained(base, adapter)
    assert type(theirs).__name__ == "PeftModelForSequenceClassification"
    ours = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        scores = [network.eval()(torch.arange(24)[None]).logits for network in (theirs, ours)]
    torch.testing.assert_close(*scores, atol=1e-5, rtol=0)
    convert(run["model"], tmp_path / "again", to="hf", adapter=adapter)
    again = load_file(tmp_path / "again/model.safetensors")
    assert again.keys() == merged.keys() and "lm_head.weight" not in again
    assert all(torch.allclose(again[name], tensor, atol=1e-6, rtol=0) for name, tensor in merged.items())

    saved = tmp_path / "saved_by_peft"
    theirs.save_pretrained(saved)
    second = one_rank.run(TRAIN, **run | {"lora": {"path": str(saved)}, "steps": 0, "evaluate": True})
    assert second["valid_before"] == pytest.approx(alone["valid_after"], rel=1e-6)
    refused = one_rank.run("ranks.tasks.refusal", task="train", steps=0, model=run["model"],
                      samples=run["samples"], lora={"path": str(saved)})  # fmt: skip
    assert "is an adapter of a reward model, and pretrain needs one of a language" in refused["text"]


def test_resumes_bitwise_in_bf16(one_rank: RankPool, run: dict[str, Any], tmp_path: Path) -> None:
    run = run | {"precision": "bf16", "steps": 4}
    uninterrupted = one_rank.run(TRAIN, **run, save_at=[2], root=tmp_path)
    resumed = one_rank.run(TRAIN, **run, resume=tmp_path / "iter_0000002")
    assert resumed["digest"] == uninterrupted["digest"] and resumed["loss"] == uninterrupted["loss"][2:]


def test_export_and_checkpoint_have_the_score_head(two_ranks: RankPool, run: dict[str, Any], tmp_path: Path) -> None:
    exported, root = tmp_path / "hf", tmp_path / "checkpoints"
    two_ranks.run(SAVE, **run, root=root, destination=exported, tp=2)
    tensors = load_file(exported / "model.safetensors")
    assert tuple(tensors["score.weight"].shape) == (1, 32) and "lm_head.weight" not in tensors
    network = AutoModelForSequenceClassification.from_pretrained(exported)
    assert type(network).__name__ == "Qwen3ForSequenceClassification" and network.config.num_labels == 1
    # The checkpoint has the same model, and so has one that is converted from the folder.
    convert(exported, tmp_path / "torch_dist", to="torch_dist")
    for number, (source, like) in enumerate(((root, exported), (tmp_path / "torch_dist", None))):
        convert(source, tmp_path / str(number), to="hf", hf_like=like)
        again = load_file(tmp_path / str(number) / "model.safetensors")
        assert again.keys() == tensors.keys()
        assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(UsageError, match="which has no reward models"):
        convert(exported, tmp_path / "torch", to="torch")
