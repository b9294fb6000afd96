"""``megatron.bridge`` where NVIDIA's package is not installed."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import isthmus
from isthmus.config.presets import preset_names
from isthmus.engine.upstream import import_hooks
from isthmus.errors import UsageError
from isthmus.recipes.model.bridge_config import pretrain_config
from isthmus.recipes.model.bridge_modules import module_name, provide_bridge
from ranks.tiny import build_model_folder


@pytest.fixture
def provided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.setattr(import_hooks._finder, "modules", dict(import_hooks._finder.modules))
    provide_bridge()
    yield
    for name in set(sys.modules) - before:
        if name.startswith("megatron.bridge"):
            del sys.modules[name]


def test_modules(provided: None) -> None:
    assert importlib.import_module("megatron.bridge").AutoBridge is isthmus.AutoBridge
    names = {preset: module_name(preset).removeprefix("megatron.bridge.recipes.") for preset in preset_names("models")}
    assert len(set(names.values())) == len(names)
    shown = ("llama3.2-1b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-30b-a3b", "qwen2.5-7b")
    assert [names[preset] for preset in shown] == [
        "llama.llama32_1b", "qwen.qwen3_600m", "qwen.qwen3_1p7b", "qwen.qwen3_30b_a3b", "qwen.qwen25_7b",
    ]  # fmt: skip
    config = importlib.import_module("megatron.bridge.recipes.llama.llama32_1b").pretrain_config(train_iters=7)
    assert (config.model.path, config.model.init, config.train.steps) == ("preset:llama3.2-1b", "random", 7)
    assert config.data.mock and config.recipe == "pretrain"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("megatron.bridge.recipes.llama.llama99_1b")


@pytest.mark.processes
def test_the_megatron_core_of_the_script_comes_first() -> None:
    code = "from isthmus.recipes.model.bridge_modules import provide_bridge; provide_bridge(); import sys; "
    subprocess.run([sys.executable, "-c", code + "assert 'megatron' not in sys.modules"], check=True)


def test_a_provider_is_the_model_of_a_config(tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "model", "llama")
    provider = isthmus.AutoBridge.from_hf_pretrained(model).to_megatron_provider()
    provider.tensor_model_parallel_size = 2
    config = pretrain_config("llama3.2-1b", data_paths=["a.jsonl"], tensor_model_parallel_size=4, dir="run")
    assert (config.parallel.tp, config.data.files, config.data.mock, config.out) == (4, ("a.jsonl",), False, "run")
    config.model = provider  # type: ignore[assignment]
    assert (config.model.path, config.model.init, config.parallel.tp) == (str(model), "hf", 2)


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match=r"comm_overlap_config has no setting here. Known arguments: train_iters, "):
        pretrain_config("llama3.2-1b", comm_overlap_config=None)
