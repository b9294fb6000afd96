"""isthmus.AutoBridge and the examples of the Python API, on 1 to 4 ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from isthmus.convert.legacy.legacy_layout import LegacyLayout
from isthmus.convert.verify.compare import compare_models
from isthmus.errors import UsageError
from isthmus.hf.tiny_model import build_tiny_qwen3
from isthmus.recipes.model.auto_bridge import AutoBridge
from ranks.bridge_tasks import EXAMPLES
from ranks.rank_pool import RankPool
from ranks.tiny import add_mtp_layers, build_model_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 model with a tokenizer."""
    return build_tiny_qwen3(
        tmp_path_factory.mktemp("model") / "tiny",
        (f"The number after {number} is {number + 1}." for number in range(64)),
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip


def changed(model: Path, exported: Path) -> bool:
    before, after = load_file(model / "model.safetensors"), load_file(exported / "model.safetensors")
    assert before.keys() == after.keys()
    return all(not torch.equal(before[name], after[name]) for name in before)


def test_every_example_is_tested() -> None:
    tested = Path(__file__).read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in tested] == []


def test_program_of_megatron_bridge(model: Path, one_rank: RankPool, tmp_path: Path) -> None:
    loss = one_rank.run("ranks.bridge_tasks.run_program_of_bridge", model=model, folder=tmp_path)
    assert loss == pytest.approx(5.7, abs=0.3)  # ln of the vocabulary: the tokens are random
    compare_models(model, tmp_path / "exported")
    assert changed(model, tmp_path / "run/hf")


def test_plain_loop(model: Path, one_rank: RankPool, two_ranks: RankPool, tmp_path: Path) -> None:
    losses = one_rank.run("ranks.bridge_tasks.run_example", name="train_loop.py", args=[model, tmp_path / "one"])
    sharded = two_ranks.run("ranks.bridge_tasks.run_example", name="train_loop.py", args=[model, tmp_path / "two"])
    assert sharded == pytest.approx(losses, rel=1e-5) and losses[-1] < losses[0] - 0.4
    assert changed(model, tmp_path / "two") and (tmp_path / "two" / "tokenizer.json").is_file()
    AutoModelForCausalLM.from_pretrained(tmp_path / "two")


@pytest.mark.thorough_cases("qwen3", "deepseek_v3")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "gpt2"])
def test_plain_loop_updates_replicated_parameters_alike(
    family: str, one_rank: RankPool, two_ranks: RankPool, tmp_path: Path
) -> None:
    dropout = {"attn_pdrop": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2} if family == "gpt2" else {}
    model = build_model_folder(tmp_path / "model", family, num_hidden_layers=2, **dropout)
    one_rank.run("ranks.bridge_tasks.train_plainly", model=model, destination=tmp_path / "one")
    before, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "one"))
    for name, tensor in expected.items():
        assert not torch.equal(tensor, before[name]) or "e_score_correction_bias" in name or "experts" in name, name
    for sp in (False, True):
        out = tmp_path / f"sp-{sp}"
        two_ranks.run("ranks.bridge_tasks.train_plainly", model=model, destination=out, tp=2, sp=sp)
        got = load_file(out / "model.safetensors")
        assert {name for name, tensor in expected.items() if (got[name] - tensor).abs().max() > 2e-6} == set()


@pytest.mark.thorough
def test_parallel_loop(model: Path, one_rank: RankPool, four_ranks: RankPool, tmp_path: Path) -> None:
    name = "train_loop_parallel.py"
    losses = one_rank.run("ranks.bridge_tasks.run_example", name=name, args=[model, tmp_path / "one"])
    for layout in (["tp=2", "pp=2"], ["pp=2"]):
        out = tmp_path / "-".join(layout)
        sharded = four_ranks.run("ranks.bridge_tasks.run_example", name=name, args=[model, out, *layout])
        assert sharded == pytest.approx(losses, rel=1e-5)
        assert changed(model, out)
    assert losses[-1] < losses[0] - 0.4


def test_engine_gets_the_trained_weights(model: Path, two_ranks: RankPool) -> None:
    two_ranks.run("ranks.bridge_tasks.run_example", name="update_inference_engine.py", args=[model])


@pytest.mark.parametrize("name", ["convert_checkpoints.py", "register_family.py"])
def test_conversion_examples(name: str, model: Path, one_rank: RankPool, tmp_path: Path) -> None:
    one_rank.run("ranks.bridge_tasks.run_example", name=name, args=[model, tmp_path / "out"])
    for folder in ("hf",) if name == "convert_checkpoints.py" else ("acme-again", "acme-live"):
        assert (tmp_path / "out" / folder / "model.safetensors").is_file()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("folders")
    tied = build_model_folder(root / "tied", "qwen3", tie_word_embeddings=True)
    tensors = load_file(tied / "model.safetensors")
    tensors["model.norm.weight"][3] = -0.0
    save_file(tensors, tied / "model.safetensors", {"format": "pt"})
    return {
        "tied": tied,
        "stacked experts": build_model_folder(root / "experts", "gpt_oss", dtype=torch.bfloat16),
        "MTP": add_mtp_layers(build_model_folder(root / "mtp", "deepseek_v3", num_mtp_layers=1)),
    }


ALL_GATHER, BROADCAST, ALL_TO_ALL = "_allgather_base_", "broadcast_", "alltoall_base_"


@pytest.mark.thorough_cases("tp2", "pp2", "tp2-dp2")
@pytest.mark.parametrize(
    ("name", "ranks", "layout", "collectives", "received"),
    [
        pytest.param("tied", 2, {"tp": 2}, {BROADCAST: 26}, 0.51, id="tp2"),
        pytest.param("tied", 2, {"pp": 2, "dtype": "bfloat16"}, {BROADCAST: 7}, 0.27, id="pp2"),
        pytest.param("tied", 2, {}, {}, 0.0, id="dp2"),
        pytest.param("tied", 2, {"fsdp": True, "rank0_only": True}, {ALL_GATHER: 13}, 0.51, id="fsdp2"),
        pytest.param("tied", 4, {"tp": 2, "pp": 2}, {BROADCAST: 27}, 0.77, id="tp2-pp2"),
        pytest.param("tied", 4, {"tp": 2, "rank0_only": True}, {ALL_TO_ALL: 13}, 0.5, id="tp2-dp2"),
        pytest.param("stacked experts", 2, {"ep": 2}, {BROADCAST: 16}, 0.4, id="ep2"),
        pytest.param("stacked experts", 2, {"etp": 2}, {BROADCAST: 16}, 0.4, id="etp2"),
        pytest.param("MTP", 2, {"pp": 2, "rank0_only": True}, {ALL_TO_ALL: 11}, 0.67, id="pp2-mtp"),
    ],
)
def test_exported_weights_are_those_of_the_file(
    name: str,
    ranks: int,
    layout: dict[str, Any],
    collectives: dict[str, int],
    received: float,
    folders: dict[str, Path],
    worlds: dict[int, RankPool],
) -> None:
    """With a broadcast for each rank that has a part of a bucket of tensors, and none if each rank has all of them.

    A rank receives what it does not have; ``received`` is the most of a rank, of the bytes of the model.
    """
    names = sorted(load_file(folders[name] / "model.safetensors"))
    size = (folders[name] / "model.safetensors").stat().st_size
    task = {"model": folders[name], "bucket_bytes": size // 10, **layout}
    first, *others = worlds[ranks].run("ranks.bridge_tasks.export_weights", **task)
    assert first["names"] == names
    assert all(other["names"] == ([] if "rank0_only" in layout else names) for other in others)
    for rank in (first, *others):
        assert rank["different"] == []
        assert 0 < rank["peak"] < 0.5  # of the bytes of the model, which has four layers
        assert rank["received"] <= received and rank["objects"] <= 4
    assert first["collectives"] == collectives


def test_calls_of_megatron_bridge(model: Path, four_ranks: RankPool, tmp_path: Path) -> None:
    out = tmp_path / "out"
    kind, text = four_ranks.run("ranks.bridge_tasks.provider_round_trip", model=model, destination=out, tp=2, pp=2)
    assert kind == "UsageError" and "tp=3 does not divide" in text
    compare_models(model, out)


def test_a_checkpoint_without_config_has_that_of_the_bridge(model: Path, tmp_path: Path) -> None:
    AutoBridge.import_ckpt(model, tmp_path / "megatron", to="torch", layout=LegacyLayout(tp=2))
    shutil.rmtree(tmp_path / "megatron/hf")
    AutoBridge.from_hf_pretrained(model).export_ckpt(tmp_path / "megatron", tmp_path / "back")
    compare_models(model, tmp_path / "back")
    assert (tmp_path / "back/tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_refusals(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a model without weights"):
        AutoBridge.from_hf_pretrained("preset:qwen3-0.6b")
    with pytest.raises(UsageError, match="has not built this model"):
        AutoBridge.from_hf_pretrained(model).save_hf_pretrained([], tmp_path / "out")
