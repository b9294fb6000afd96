"""``megatron.bridge`` of scripts for NVIDIA's Megatron Bridge, where that package is not installed.

``AutoBridge`` is :class:`isthmus.AutoBridge`; ``megatron.bridge.recipes.<family>.<size>`` has ``pretrain_config`` if a
preset has this size. Other names of the package are missing. Nothing of Megatron-Core is imported before the script
asks for it: the script may bring its own version.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from typing import Any

from isthmus.config.presets import preset_names
from isthmus.engine.upstream.import_hooks import provide_on_import

_NAME = "megatron.bridge"


def provide_bridge() -> None:
    """Answer imports of ``megatron.bridge`` in this process, unless NVIDIA's package is there."""
    presets = {module_name(preset): preset for preset in preset_names("models")}
    packages = {name.rpartition(".")[0] for name in presets}
    for name in (_NAME, f"{_NAME}.recipes", *packages, *presets):
        provide_on_import(name, functools.partial(_find, name, presets.get(name)))


def module_name(preset: str) -> str:
    """Such as ``megatron.bridge.recipes.llama.llama32_1b`` of llama3.2-1b, ``...qwen.qwen3_600m`` of qwen3-0.6b."""
    size = re.sub(r"-0\.(\d)b", r"-\g<1>00m", preset)
    size = re.sub(r"(?<=-)(\d+)\.(\d+)b", r"\1p\2b", size)
    family = re.match("[a-z]+", preset)
    assert family is not None
    return f"{_NAME}.recipes.{family[0]}.{size.replace('.', '').replace('-', '_')}"


def _find(name: str, preset: str | None, folders: Sequence[str]) -> ModuleSpec | None:
    if PathFinder.find_spec(name, folders) is not None:
        return None
    return spec_from_loader(name, _Loader(preset), is_package=preset is None)


class _Loader(Loader):
    def __init__(self, preset: str | None) -> None:
        self.preset = preset

    def exec_module(self, module: Any) -> None:
        if module.__name__ == _NAME:
            from isthmus.recipes.model.auto_bridge import AutoBridge

            module.AutoBridge = AutoBridge
        elif self.preset is not None:
            from isthmus.recipes.model.bridge_config import pretrain_config

            module.pretrain_config = functools.partial(pretrain_config, self.preset)
