"""Between Hugging Face folders, Megatron's checkpoints and the live tensors of a rank, by the table of the family.

The package can be called: ``isthmus.convert("models/Qwen3-0.6B", "checkpoints/qwen3")`` is
:func:`isthmus.convert.transfer.convert`, imported when it is called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        from isthmus.convert.transfer import convert

        return convert(*arguments, **settings)


sys.modules[__name__].__class__ = _Package
