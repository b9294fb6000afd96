"""Records every operator that runs, with its inputs and results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorder(TorchDispatchMode):
    """Keeps the name of each operator, and the shapes and types of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[torch.Size]]] = []
        self.created: list[tuple[str, torch.dtype, int]] = []
        """Operator, type and number of elements of each result that does not alias an input."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.calls.append((func.overloadpacket.__name__, [tensor.shape for tensor in inputs]))
        known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        for result in tree_leaves(results):
            if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in known:
                elements = result.untyped_storage().nbytes() // result.element_size()
                self.created.append((func.overloadpacket.__name__, result.dtype, elements))
        return results

    def largest(self, dtype: torch.dtype) -> int:
        """Elements of the largest allocation of this type."""
        return max((elements for _, result_dtype, elements in self.created if result_dtype == dtype), default=0)
