"""Conversion between Hugging Face folders, Megatron checkpoints and the tensors of a live model.

The package is callable: ``isthmus.convert(...)`` calls :func:`isthmus.convert.transfer.convert`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from isthmus.convert.transfer import convert

        return convert(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
