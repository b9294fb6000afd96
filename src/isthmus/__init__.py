"""Isthmus: train Hugging Face models on Megatron-Core, and get Hugging Face models back.

``isthmus.sft(config)``, ``isthmus.dpo(config)``, ``isthmus.kto(config)``, ``isthmus.reward(config)``,
``isthmus.distill(config)``, ``isthmus.grpo(config)``, ``isthmus.pretrain(config)`` and
``isthmus.convert(source, destination)`` are what the commands of the same name run;
``isthmus.load_model(hf_dir, ...)`` gives the live Megatron-Core model, ``isthmus.AutoBridge`` also writes it back, and
``isthmus.register_family`` adds the weight mapping of an architecture; ``isthmus.Callback``
is the base class of callbacks. They are imported on first use, since
importing torch takes longer than everything the command line does by itself; ``__init__.pyi`` has their types.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "sft": ("isthmus.recipes.run", "sft"),
    "dpo": ("isthmus.recipes.run", "dpo"),
    "kto": ("isthmus.recipes.run", "kto"),
    "distill": ("isthmus.recipes.run", "distill"),
    "reward": ("isthmus.recipes.run", "reward"),
    "grpo": ("isthmus.recipes.run", "grpo"),
    "pretrain": ("isthmus.recipes.run", "pretrain"),
    "AutoBridge": ("isthmus.recipes.model.auto_bridge", "AutoBridge"),
    "register_family": ("isthmus.families.registry", "register_family"),
    "Callback": ("isthmus.train.callbacks", "Callback"),
    "load_model": ("isthmus.recipes.model.load_model", "load_model"),
}
__all__ = ["__version__", "convert", *_LAZY]


def __getattr__(name: str) -> Any:
    if name == "convert":  # the package of this name, which can be called
        return importlib.import_module("isthmus.convert")
    if name not in _LAZY:
        return _renamed(name)
    module, attribute = _LAZY[name]
    return getattr(importlib.import_module(module), attribute)


def _renamed(name: str) -> Any:
    """What an earlier name of the package means now, with a warning."""
    if not name.startswith("_"):
        deprecated_names = importlib.import_module("isthmus.config.deprecated_names")
        renamed = deprecated_names.PYTHON.get(name)
        if renamed is not None and renamed.is_refused:
            raise AttributeError(f"isthmus.{renamed.explain(name)}")
        if renamed is not None:
            deprecated_names.warn(f"isthmus.{name}", renamed)
            return __getattr__(renamed.to)
    raise AttributeError(f"module 'isthmus' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
