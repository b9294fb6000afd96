"""Runs ``tools/preprocess_data.py`` of Megatron-LM; without Triton, the module that needs it is replaced by a stub."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

_KERNELS = "megatron.core.transformer.custom_layers.batch_invariant_kernels"

if __name__ == "__main__":
    script, *flags = sys.argv[1:]
    if importlib.util.find_spec("triton") is None:
        kernels: Any = types.ModuleType(_KERNELS)
        kernels.__getattr__ = lambda name: None
        sys.modules[_KERNELS] = kernels
    sys.path.insert(0, str(Path(script).parents[1]))
    sys.argv = [script, *flags]
    # In this module's namespace, since processes that the script forks look for its classes in the main module.
    globals()["__file__"] = script
    exec(compile(Path(script).read_text(), script, "exec"), globals())
