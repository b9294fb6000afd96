"""Presets are complete, their batches divide and their layouts fit their models."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from isthmus.cli.options import config_and_overrides, spread_data
from isthmus.config.load import load_config
from isthmus.config.model_file import read_model
from isthmus.config.presets import config_path, opening_lines, preset_names
from isthmus.config.schema import RunConfig
from isthmus.config.schema.model import ModelConfig
from isthmus.families.registry import family_for
from isthmus.recipes.plan.layout_checks import check_experts, check_fsdp_precision, check_layout, check_micro_batches
from isthmus.recipes.plan.memory_estimate import estimate_memory
from isthmus.recipes.plan.model_plan import open_run_model, plan_model
from sweep import swept

OF_ID = {
    "meta-llama/Llama-3.2-1B-Instruct": "llama3.2-1b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama3.1-8b",
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": "llama4-maverick",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "llama4-scout",
    "google/gemma-4-26B-A4B-it": "gemma4-26b-a4b",
    "google/gemma-4-31B-it": "gemma4-31b",
    "google/gemma-4-E4B-it": "gemma4-e4b",
    "nvidia/Nemotron-H-56B-Base-8K": "nemotron-h-56b",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron3-nano-30b-a3b",
}
"""Model presets of Hub ids that are not named like them."""
OPTIONS = {"--data": "data", "--out": "out", "--nproc": None}


def opened(name: str) -> tuple[RunConfig, int]:
    """The config that the opening command of a preset runs, and its number of ranks."""
    lines = list(opening_lines(config_path(f"preset:{name}")))
    words = spread_data(next(line for line in lines if line.startswith("isthmus ")).split())[1:]
    recipe, rest, flags, world = words[0], [], {}, 1
    while words := words[1:]:
        if words[0] not in OPTIONS:
            rest.append(words[0])
            continue
        if words[0] == "--nproc":
            world = int(words[1])
        else:
            flags[OPTIONS[words[0]]] = [words[1]] if words[0] == "--data" else words[1]
        words = words[1:]
    file, overrides = config_and_overrides(rest)
    assert file is not None and Path(file).stem == name
    return load_config(recipe, file, overrides, flags), world


def model_preset(config: RunConfig) -> str:
    """The preset with the config.json of the model."""
    path = str(config.model.path)
    if config.model.init == "random":
        return path
    return f"preset:{OF_ID.get(path, path.partition('/')[2].lower())}"


@pytest.mark.parametrize("name", swept(preset_names(), ("llama3.2-1b-sft", "qwen3-30b-a3b-sft")))
def test_preset_layout_fits_its_model(name: str) -> None:
    config, world = opened(name)
    assert config.model.path is not None
    model = read_model(model_preset(config))
    family = family_for(model)
    arch = family.to_architecture(model)
    family.check_training(model)
    parallel = config.parallel
    parallel.check_world_size(world)
    check_layout(arch, parallel)
    check_experts(arch, config.moe)
    check_micro_batches(config.train, parallel, world)
    check_fsdp_precision(parallel, config.train.precision or "bf16")
    train = config.train
    assert train.global_batch_size % (train.micro_batch_size * parallel.dp(world)) == 0
    assert config.data.seq_length <= arch.max_position_embeddings


def test_benchmark_presets_have_the_published_settings() -> None:
    llama = opened("llama3.2-1b-sft")[0]
    assert (llama.train.global_batch_size, llama.optim.lr) == (128, 2.83e-5)
    values = {}
    for name in ("llama3.1-8b-bf16", "llama3.1-8b-fp8", "llama2-7b-bf16", "llama2-7b-fp8", "llama3-70b-fsdp",
                 "llama2-70b-fsdp", "deepseek-v2-lite", "mixtral-8x7b", "qwen2.5-7b", "qwen2.5-72b-fsdp"):  # fmt: skip
        config, world = opened(f"{name}-benchmark")
        assert (world, config.train.steps, config.data.mock, config.model.init) == (8, 50, True, "random")
        train = config.train
        values[name] = (train.micro_batch_size, train.global_batch_size, config.data.seq_length, train.precision)
        assert config.parallel.fsdp == ("fsdp" in name) == (train.recompute == "full")
    assert values == {
        "llama3.1-8b-bf16": (2, 128, 8192, "bf16"),
        "llama3.1-8b-fp8": (2, 128, 8192, "fp8"),
        "llama2-7b-bf16": (4, 256, 4096, "bf16"),
        "llama2-7b-fp8": (4, 256, 4096, "fp8"),
        "llama3-70b-fsdp": (3, 24, 8192, "bf16"),
        "llama2-70b-fsdp": (7, 56, 4096, "bf16"),
        "deepseek-v2-lite": (4, 256, 4096, "bf16"),
        "mixtral-8x7b": (2, 32, 4096, "bf16"),
        "qwen2.5-7b": (10, 640, 2048, "bf16"),
        "qwen2.5-72b-fsdp": (4, 32, 2048, "bf16"),
    }


@pytest.mark.thorough_cases(
    "deepseek-v3.2-lora",
    "glm-5-lora",
    "gpt-oss-120b-lora",
    "ling-mini-2.0-sft",
    "mimo-v2-flash-lora",
    "minimax-m2.5-lora",
    "qwen3.5-122b-a10b-lora",
)
@pytest.mark.slow_cases("qwen3-30b-a3b-sft")
@pytest.mark.parametrize(
    "name",
    swept(
        (name for name in preset_names() if name.endswith(("-sft", "-lora"))),
        ("gpt-oss-20b-sft", "llama3.1-8b-sft", "qwen3-30b-a3b-sft"),
    ),
)
def test_preset_fits_the_gpus_that_it_names(name: str) -> None:
    """As a run estimates it before it starts; benchmarks have the settings of their publication."""
    memory = re.search(r"GPUs? of (\d+) GB", " ".join(opening_lines(config_path(f"preset:{name}"))))
    assert memory is not None
    capacity = int(memory[1]) * 2**30
    config, world = opened(name)
    random = ModelConfig(path=model_preset(config), init="random")
    config = config.model_copy(update={"model": random})
    estimate = estimate_memory(
        plan_model(open_run_model(config), config, world_size=world),
        config,
        config.train.precision or "bf16",
        gpu_bytes=capacity,
    )
    assert estimate.total < 0.95 * capacity, str(estimate)
