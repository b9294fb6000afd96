"""A rehearsal has the architecture and layout of its run, and every size that the layout and FP8 must divide."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isthmus.config.load import load_config
from isthmus.config.presets import preset_names
from isthmus.config.schema import RunConfig
from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.recipes.plan.model_plan import check_training, open_run_model, plan_model
from isthmus.recipes.plan.rehearsal import rehearse

FEATURES = (
    "position", "rotary_percent", "rotary_interleaved", "normalization", "norm_bias", "form", "qkv_bias", "qk_norm",
    "attention_sinks", "activation", "gated", "mlp_bias", "tie_embeddings", "init_std", "rotary_base",
)  # fmt: skip
LAYOUTS = ({}, {"tp": 8}, {"pp": 2, "vpp": 2}, {"tp": 2, "pp": 3, "cp": 2})
OTHERS = {"tp": 2, "pp": 2}
ARCHETYPES = ("qwen3-0.6b", "gpt2-125m-moe", "deepseek-v3")
"""Dense; learned positions and experts; latent attention, experts and MTP layers."""


def config_of(model: str, **settings: Any) -> RunConfig:
    base: dict[str, Any] = {"model.path": model, "out": "runs/x", "model.init": "random", "data.mock": True}
    return load_config("pretrain", None, [], base | {"train.steps": 500} | settings)


def both(config: RunConfig, ranks: int) -> tuple[Family, Architecture, Architecture]:
    small, _ = rehearse(config, ranks)
    plan = plan_model(open_run_model(small), small, world_size=ranks)
    check_training(small, plan)
    return plan.family, plan_model(open_run_model(config), config, world_size=ranks).architecture, plan.architecture


def canonical_names(family: Family, arch: Architecture) -> set[str]:
    """Of the tensors of each kind of layer."""
    of_one_expert = arch.with_settings({"moe": arch.moe and replace(arch.moe, num_experts=1)})
    return {placed.rule.canonical for placed in family.placements(of_one_expert).values()}


def presets_and_layouts() -> Iterator[Any]:
    """Archetypes in all layouts, and each other preset in one of them, in turn."""
    layouts = itertools.cycle((*LAYOUTS, OTHERS))
    for name in preset_names("models"):
        if name in ARCHETYPES:
            yield from (pytest.param(name, layout, id=f"{name}-{layout}") for layout in LAYOUTS)
        else:
            layout = next(layouts)
            yield pytest.param(name, layout, id=f"{name}-{layout}", marks=pytest.mark.sweep)


@pytest.mark.slow_cases("deepseek-v3-{}")
@pytest.mark.sweep_cases("deepseek-v3-{'tp': 8}")
@pytest.mark.parametrize(("preset", "layout"), [*presets_and_layouts()])
def test_every_preset_in_several_layouts(preset: str, layout: dict[str, int]) -> None:
    config = config_of(f"preset:{preset}", **{f"parallel.{name}": size for name, size in layout.items()})
    ranks = config.parallel.tp * config.parallel.pp * config.parallel.cp
    try:
        plan_model(open_run_model(config), config, world_size=ranks)
    except UsageError as error:  # this model cannot have the layout
        pytest.skip(str(error))
    family, large, small = both(config, ranks)
    assert [small.setting(name) for name in FEATURES] == [large.setting(name) for name in FEATURES]
    assert (small.latent is None, small.moe is None) == (large.latent is None, large.moe is None)
    assert canonical_names(family, small) == canonical_names(family, large)
    sizes = [
        small.hidden_size,
        small.mlp.ffn_hidden_size,
        small.attention.num_attention_heads * small.attention.kv_channels,
    ]
    assert all(size % (16 * config.parallel.tp) == 0 for size in sizes)
    numel = sum(rows * (columns[0] if columns else 1) for rows, *columns in family.hf_shapes(small).values())
    assert numel < 40_000_000


@pytest.mark.slow
def test_experts_keep_groups_and_expert_parallelism() -> None:
    config = config_of("preset:deepseek-v3", **{"parallel.ep": 8, "parallel.tp": 2})
    _, large, small = both(config, 16)
    assert large.moe is not None and small.moe is not None and small.num_layers == 2
    assert (small.moe.num_groups, small.moe.top_k, small.moe.dense_layers) == (8, 8, (0,))
    assert small.moe.num_experts % 8 == 0 and small.moe.num_experts < large.moe.num_experts


def test_settings_and_lines() -> None:
    config = config_of(
        "preset:llama3.1-8b",
        **{
            "train.precision": "fp8", "train.global_batch_size": 128, "train.micro_batch_size": 2,
            "data.seq_length": 8192, "data.length_buckets": [16384], "train.profile": "10-12", "platform": "rocm",
            "optim.warmup_steps": 100, "optim.schedule": "wsd", "optim.decay_steps": 50, "optim.offload": True,
            "tokenizer.type": "NullTokenizer", "tokenizer.vocab_size": 128255, "checkpoint.resume": "/ckpt",
        },
    )  # fmt: skip
    small, lines = rehearse(config, 8)
    train = small.train
    assert (train.steps, train.precision, train.emulate_fp8, train.profile) == (5, "fp8", True, "5-5")
    assert (train.micro_batch_size, train.global_batch_size, small.platform) == (2, 32, "cpu")
    assert (small.optim.warmup_steps, small.optim.decay_steps, small.optim.lr) == (1, 1, config.optim.lr)
    assert small.tokenizer.vocab_size == 511 and small.checkpoint.resume == "auto" and not small.optim.offload
    expected = ["model.config.hidden_size: 4096 -> 64", "data.seq_length: 8192 -> 128", "train.steps: 500 -> 5"]
    assert set(expected) <= set(lines) and not any("micro_batch" in line or "optim.lr" in line for line in lines)
    assert not any("rope" in line or "dtype" in line for line in lines)
    assert small.model.config["hidden_size"] == 64 and small.model.path == "preset:llama3.1-8b"


@pytest.mark.parametrize(("scaling", "multiple"), [("blockwise", 128), ("mxfp8", 32)])
def test_layers_have_whole_blocks_of_fp8_on_each_rank(scaling: str, multiple: int) -> None:
    settings = {"train.precision": "fp8", "train.fp8_scaling": scaling, "parallel.tp": 2}
    _, _, small = both(config_of("preset:llama3.1-8b", **settings), 2)
    shapes = [(linear.out, linear.inside) for block in (small.attention, small.mlp) for linear in block.linears(2)]
    assert len(shapes) == 4 and all(size % multiple == 0 for shape in shapes for size in shape)


def test_texts_keep_their_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("To be")
    config = config_of("preset:qwen3-0.6b", **{"data.mock": False, "data.files": [str(tmp_path / "a.txt")]})
    small, lines = rehearse(config, 1)
    assert small.data.files == config.data.files and "vocab_size" not in small.model.config
    assert small.train.precision == "bf16" and "train.precision: None -> bf16" in lines
