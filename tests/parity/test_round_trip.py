"""Import and export without training are bitwise identical."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from isthmus.convert.transfer import convert
from ranks.rank_pool import RankPool
from ranks.tiny import build_model_folder
from ranks.tiny_families import TINY_FAMILIES
from sweep import BLOCK_FAMILIES, thorough_but

# Each in one layout, in which its special tensors are sharded.
OTHERS: list[tuple[str, dict[str, int]]] = [
    ("llama", {"tp": 2}),
    ("mistral", {"pp": 2}),
    ("qwen2", {"tp": 2}),
    ("seed_oss", {"tp": 2}),
    ("smollm3", {"pp": 2}),
    ("granite", {"pp": 2}),
    ("phi3", {"tp": 2}),
    ("starcoder2", {"tp": 2}),
    ("gpt_neox", {"tp": 2}),
    ("gpt2", {"tp": 2}),
    ("gpt2", {"pp": 2}),
    ("olmo2", {"tp": 2}),
    ("glm4", {"tp": 2}),
    ("cohere", {"pp": 2}),
    ("gemma", {"pp": 2}),
    ("gemma2", {"pp": 2}),
    ("gemma3_text", {"tp": 2}),
    ("phimoe", {"tp": 2}),
    *((family, tiny.layouts[0]) for family, tiny in TINY_FAMILIES.items() if tiny.layouts),
]
FURTHER = [(family, layout) for family, tiny in TINY_FAMILIES.items() for layout in tiny.layouts[1:]]
WITH_EXPERTS = [
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
    "ernie4_5_moe",
    "glm4_moe",
    "gpt_oss",
    "isthmus",
]
IN_MAKE_TEST = (
    *BLOCK_FAMILIES, "apertus", "aria_text", "codegen", "ernie4_5_moe", "gemma4_text", "gpt_neox", "llama4", "mistral",
    "stablelm", "step3p7",
)  # fmt: skip
"""Together they have every kind of tensor rule (test_sweeps.py); tests/unit/convert/test_online.py has all families."""
LAYOUTS = [
    pytest.param(1, {}, id="one"),
    pytest.param(2, {"tp": 2}, id="tp2"),
    pytest.param(2, {"pp": 2}, id="pp2"),
]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    values: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        values |= load_file(file)
    return values


def assert_same_tensors(export: Path, source: Path) -> None:
    ours, theirs = tensors_of(export), tensors_of(source)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


def assert_loads_without_warnings(export: Path) -> None:
    _, loading = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not any(loading.values())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_export_equals_transformers_file(
    tied: bool, ranks: int, layout: dict[str, int], worlds: dict[int, RankPool], tmp_path: Path
) -> None:
    source = build_model_folder(tmp_path / "source", "qwen3", tie_word_embeddings=tied)
    assert_exports_unchanged(worlds[ranks], source, tmp_path / "export", **layout)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(*case, marks=() if case in OTHERS and case[0] in IN_MAKE_TEST else pytest.mark.thorough)
        for case in [*OTHERS, *FURTHER]
    ],
    ids=str,
)
def test_export_of_other_families(family: str, layout: dict[str, int], two_ranks: RankPool, tmp_path: Path) -> None:
    assert_exports_unchanged(two_ranks, build_model_folder(tmp_path / "source", family), tmp_path / "export", **layout)


@pytest.mark.parametrize("family", thorough_but(WITH_EXPERTS, IN_MAKE_TEST))
def test_export_of_moe_families(family: str, two_ranks: RankPool, tmp_path: Path) -> None:
    source = build_model_folder(tmp_path / "source", family, num_hidden_layers=2)
    assert_exports_unchanged(two_ranks, source, tmp_path / "export", tp=2)


def assert_exports_unchanged(world: RankPool, source: Path, export: Path, **layout: int) -> None:
    world.run("ranks.tasks.export", model=source, destination=export, **layout)
    assert (export / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    exported, original = (AutoConfig.from_pretrained(folder).to_dict() for folder in (export, source))
    assert exported | {"_name_or_path": ""} == original | {"_name_or_path": ""}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bf16_weights_keep_dtype_and_bytes(precision: str, two_ranks: RankPool, tmp_path: Path) -> None:
    source = build_model_folder(tmp_path / "source", "qwen3", dtype=torch.bfloat16)
    two_ranks.run("ranks.tasks.export", model=source, destination=tmp_path / "export", tp=2, precision=precision)
    assert_same_tensors(tmp_path / "export", source)
    assert AutoConfig.from_pretrained(tmp_path / "export").dtype == torch.bfloat16


@pytest.mark.thorough_cases("kimi_linear-4", "mamba-8")
@pytest.mark.parametrize(
    ("family", "count"), [("qwen3_5_text", 4), ("kimi_linear", 4), ("falcon_h1", 12), ("mamba", 8)]
)
def test_parameters_of_recurrences_keep_float32(family: str, count: int, two_ranks: RankPool, tmp_path: Path) -> None:
    """Published files have them in float32 beside bf16 weights; rounding them changes every decay."""
    settings = TINY_FAMILIES[family].training | {"num_hidden_layers": 4}
    source = build_model_folder(tmp_path / "source", family, dtype=torch.bfloat16, **settings)
    tensors, random = tensors_of(source), torch.Generator().manual_seed(2)
    wide = [name for name in tensors if name.endswith(("A_log", ".D", "dt_bias"))]
    tensors |= {name: torch.randn(tensors[name].shape, generator=random) for name in wide}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert len(wide) == count
    two_ranks.run("ranks.tasks.export", model=source, destination=tmp_path / "export", tp=2, precision="bf16")
    assert_same_tensors(tmp_path / "export", source)
    convert(source, tmp_path / "megatron", to="torch_dist", dtype=torch.bfloat16)
    convert(tmp_path / "megatron", tmp_path / "back", to="hf")
    assert_same_tensors(tmp_path / "back", source)
    two_ranks.run("ranks.tasks.export", model=source, destination=tmp_path / "narrow", tp=2, dtype="bfloat16")
    assert_same_tensors(tmp_path / "narrow", source)
    convert(source, tmp_path / "wide", to="hf", dtype=torch.float32)
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "wide").values()} == {torch.float32}


def test_export_dtype(one_rank: RankPool, tmp_path: Path) -> None:
    source = build_model_folder(tmp_path / "source", "llama")
    one_rank.run("ranks.tasks.export", model=source, destination=tmp_path / "export", dtype="bfloat16")
    ours, theirs = tensors_of(tmp_path / "export"), tensors_of(source)
    assert all(torch.equal(ours[name], tensor.bfloat16()) for name, tensor in theirs.items())
    assert json.loads((tmp_path / "export/config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("sharded", "ranks", "layout"), [(False, 2, {"tp": 2}), (True, 1, {}), (True, 2, {"pp": 2}), (True, 2, {"tp": 2})]
)
def test_sharded_files(
    sharded: bool, ranks: int, layout: dict[str, int], worlds: dict[int, RankPool], tmp_path: Path
) -> None:
    source = build_model_folder(tmp_path / "source", "qwen2", shards="40KB", tie_word_embeddings=False)
    assert len(list(source.glob("*.safetensors"))) > 2
    export = tmp_path / "export"
    settings: dict[str, Any] = {"model": source, "destination": export, **layout}
    if sharded:
        worlds[ranks].run("ranks.tasks.export_sharded", max_shard_bytes=40e3, **settings)
        index = json.loads((export / "model.safetensors.index.json").read_text())
        files = {file.name for file in export.glob("*.safetensors")}
        assert len(files) > 2
        assert set(index["weight_map"].values()) == files
        (export / "config.json").write_bytes((source / "config.json").read_bytes())
    else:
        worlds[ranks].run("ranks.tasks.export", **settings)
        assert [file.name for file in export.glob("*.safetensors")] == ["model.safetensors"]
    assert_same_tensors(export, source)
    assert_loads_without_warnings(export)


def test_existing_export_is_not_overwritten(one_rank: RankPool, tmp_path: Path) -> None:
    source = build_model_folder(tmp_path / "source", "llama")
    (tmp_path / "export").mkdir()
    (tmp_path / "export/user.txt").write_text("text")
    refused = one_rank.run("ranks.tasks.refusal", task="export", model=source, destination=tmp_path / "export")
    assert (refused["kind"], refused["code"]) == ("OutputExists", 73)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "source"]
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["user.txt"]
