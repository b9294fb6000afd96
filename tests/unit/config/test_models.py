"""Model presets: their parameter counts, round trips through their families, and keys."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from isthmus.cli.main import main
from isthmus.config.load import load_config
from isthmus.config.model_file import merge_config, read_model
from isthmus.config.presets import config_path, opening_lines, preset_names
from isthmus.errors import UsageError
from isthmus.families.known_keys import IGNORED_KEYS, is_metadata, keys_read
from isthmus.families.registry import family_for
from isthmus.hf.tiny_model import effective_config
from sweep import swept

PUBLISHED = {
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 684_489_845_504,  # with the MTP layer
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.3-70b": 70_553_706_496,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,  # without vision tower, as its larger siblings
    "gemma3-12b": 11_766_034_176,
    "gemma3-27b": 27_009_346_304,
    "phi4": 14_659_507_200,
    "phi4-mini": 3_836_021_760,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-14b": 14_768_307_200,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v3.2": 685_355_329_792,  # with the MTP layer
    "gemma4-26b-a4b": 25_233_141_790,  # without vision tower, as its sibling
    "gemma4-31b": 30_697_345_340,
    "gemma4-e4b": 7_463_013_418,
    "glm-5": 755_767_304_448,  # with the MTP layer
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "kimi-k2": 1_026_408_232_448,
    "ling-mini-2.0": 16_255_643_392,
    "llama3.1-405b": 405_853_388_800,
    "llama4-scout": 107_769_861_120,  # without vision tower, as Maverick
    "llama4-maverick": 400_711_848_960,
    "mimo-v2-flash": 308_778_780_864,  # without MTP layers
    "minimax-m2.5": 228_689_764_864,  # without MTP layers
    "mixtral-8x22b": 140_620_634_112,
    "nemotron-h-56b": 56_324_350_464,
    "nemotron3-nano-30b-a3b": 31_577_940_288,
    "qwen3-32b": 32_762_123_264,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3.5-27b": 26_895_998_464,  # without vision tower and MTP layer, as its siblings
    "qwen3.5-35b-a3b": 34_660_610_688,
    "qwen3.5-122b-a10b": 122_111_526_912,
    "qwen3.5-397b-a17b": 396_346_350_336,
    "yi-34b": 34_388_917_248,
    # By hand: attention and norms, router and experts of 12 layers; tokens, positions and the last norm.
    "gpt2-125m-moe": 12 * (4 * 768 * 769 + 4 * 768 + 64 * 768 * (1 + 2 * 3072)) + (50257 + 1024 + 2) * 768,
}
"""Parameters of the weights on the Hub."""


def test_every_model_preset_has_a_parameter_count() -> None:
    assert preset_names("models") == sorted(PUBLISHED)


@pytest.mark.parametrize("name", swept(PUBLISHED, ("qwen3-0.6b", "deepseek-v3", "gpt-oss-20b", "nemotron-h-56b")))
def test_model_preset_round_trip(name: str) -> None:
    config = read_model(f"preset:{name}")
    family = family_for(config)
    arch = family.to_architecture(config)
    family.check_training(config)
    assert family.to_architecture(family.to_hf_config(arch, config)) == arch
    assert family.to_architecture(family.to_hf_config(arch)) == arch
    # Larger models are slow, and their layers are alike.
    if arch.num_layers * (arch.moe.num_experts if arch.moe else 1) < 10_000:
        assert sum(map(math.prod, family.hf_shapes(arch).values())) == PUBLISHED[name]
    is_known = family.name in CONFIG_MAPPING  # Kimi K2 and exports with modelling files have a class of their own
    of_transformers = set(effective_config({"model_type": family.name})) if is_known else set()
    known = keys_read(family, config) | of_transformers | {*IGNORED_KEYS}
    assert [key for key in config if key not in known and not is_metadata(key)] == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_opening_comment_names_the_source(name: str) -> None:
    opening = " ".join(opening_lines(config_path(f"preset:{name}", "models")))
    assert "/" in opening and ("config.json of " in opening or "databricks/megablocks" in opening)


def test_facts_beyond_the_parameter_count() -> None:
    def settings(name: str, *names: str) -> tuple[Any, ...]:
        config = read_model(f"preset:{name}")
        architecture = family_for(config).to_architecture(config)
        return tuple(architecture.setting(setting) for setting in names)

    def scaling(name: str) -> Any:
        return settings(name, "rope_scaling")[0]

    assert settings("llama3-8b", "rope_scaling", "rotary_base") == (None, 500000.0)
    assert settings("llama3.1-8b", "rotary_base") == (500000.0,)
    assert (scaling("llama3.1-8b").factor, scaling("llama3.2-1b").factor) == (8.0, 32.0)
    assert settings("llama3.2-1b", "tie_embeddings") == (True,)
    assert scaling("llama3.1-8b").kind == "llama3"
    assert scaling("llama3.1-8b").original_max_position_embeddings == 8192
    assert settings("mistral-7b-v0.1", "sliding_window") == (4096,)
    assert settings("mistral-7b-v0.3", "sliding_window") == (None,)
    assert settings("qwen2.5-7b", "norm_epsilon", "qkv_bias") == (1e-6, True)
    assert settings("qwen2.5-72b", "norm_epsilon") == (1e-5,)
    assert settings("qwen3-8b", "qk_norm", "qkv_bias") == (True, False)
    lite = settings("deepseek-v2-lite", "mla.q_lora_rank", "moe.dense_layers", "moe.normalize")
    assert lite == (None, (0,), False)
    assert settings("deepseek-v3", "moe.num_groups", "moe.group_top_k", "moe.scaling_factor") == (8, 4, 2.5)
    large = scaling("deepseek-v3")
    assert (scaling("deepseek-v2-lite").mscale, large.mscale, large.factor) == (0.707, 1.0, 40.0)
    moe = settings("gpt2-125m-moe", "position", "moe.top_k", "gated", "activation")
    assert moe == ("learned", 1, False, "gelu_tanh")


def test_model_presets_and_run_presets_are_not_interchangeable() -> None:
    with pytest.raises(UsageError, match=r"preset:llama3-8b is a model, expected a run config.*--model"):
        config_path("preset:llama3-8b")
    with pytest.raises(UsageError, match=r"llama3\.2-1b-sft is a run config, expected a model"):
        read_model("preset:llama3.2-1b-sft")
    with pytest.raises(UsageError, match=r"Did you mean preset:llama3\.1-8b"):
        read_model("preset:llama31-8b")


def test_config_keys_are_merged() -> None:
    below = {"a": 1, "rope_scaling": {"factor": 8.0, "rope_type": "llama3"}, "list": [1, 2]}
    over = {"rope_scaling": {"factor": 4.0}, "list": [3]}
    assert merge_config(below, over) == {"a": 1, "rope_scaling": {"factor": 4.0, "rope_type": "llama3"}, "list": [3]}
    assert merge_config({"rope_scaling": None}, {"rope_scaling": {"factor": 2}}) == {"rope_scaling": {"factor": 2}}


def test_model_can_be_plain_text(tmp_path: Path) -> None:
    rest = "data: {files: [a]}\nout: o\n"
    (tmp_path / "base.yaml").write_text("model: {path: old, init: random}\n" + rest)
    (tmp_path / "mine.yaml").write_text("bases: [base.yaml]\nmodel: new\n")
    model = load_config("pretrain", tmp_path / "mine.yaml").model
    assert (model.path, model.init) == ("new", "random")
    model = load_config("pretrain", tmp_path / "mine.yaml", ["model=preset:llama3-8b"]).model
    assert model.path == "preset:llama3-8b"
    model = load_config("pretrain", tmp_path / "mine.yaml", ["model={export_dtype: float32}"]).model
    assert (model.path, model.export_dtype) == ("new", "float32")
    with pytest.raises(UsageError, match=r"command line  model.init  preset:llama3-8b has no weights"):
        load_config("pretrain", tmp_path / "mine.yaml", ["model=preset:llama3-8b", "model.init=hf"])
    with pytest.raises(UsageError, match=r"config\.json with model_type"):
        load_config("pretrain", None, ["model.config.vocab_size=9", "model.init=random", "data.files=[a]", "out=o"])


@pytest.mark.slow
def test_config_commands_accept_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["config", "ls"]) == 0
    runs, models = capsys.readouterr().out.split("models (model.init=random)")
    assert "preset:llama3.2-1b-sft " in runs and "preset:llama3.2-1b " in models
    assert main(["config", "show", "preset:llama3.1-70b", "vocab_size=9", "--origin"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    where = {row[0]: row[2] for row in rows if len(row) == 3}
    assert (where["hidden_size"], where["rms_norm_eps"]) == ("preset:llama3.1-70b", "preset:llama3-8b")
    assert ["vocab_size", "9", "command", "line"] in rows
    assert main(["config", "show", "vocab_size=9", "preset:llama3.1-70b"]) == 0
    assert "vocab_size: 9" in capsys.readouterr().out
    assert main(["config", "show", "preset:llama3.1-70b", "--resolved"]) == 2
    assert main(["config", "cp", "llama3.1-70b", "mine.yaml"]) == 0
    assert read_model("mine.yaml") == read_model("preset:llama3.1-70b")
    assert Path("mine.yaml").read_text().startswith("# Llama 3.1 70B")
    capsys.readouterr()
    assert main(["config", "schema"]) == 0
    assert {"type": "string"}.items() <= json.loads(capsys.readouterr().out)["properties"]["model"]["anyOf"][0].items()
