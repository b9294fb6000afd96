"""Peak memory of live tensors."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Sums the bytes of all tensors that operators create, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.largest_bytes = 0
        """The largest single allocation."""
        self._live: dict[int, int] = {}
        self._total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(item, DTensor) for item in types):  # its own dispatch calls operators of local tensors
            return NotImplemented
        input_ids = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        results = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if id(storage) not in input_ids and id(storage) not in self._live:
                    self._live[id(storage)] = storage.nbytes()
                    self._total += storage.nbytes()
                    self.largest_bytes = max(self.largest_bytes, storage.nbytes())
                    weakref.finalize(storage, self._freed, id(storage))
        self.peak_bytes = max(self.peak_bytes, self._total)
        return results

    def resize(self, storage: UntypedStorage, size: int) -> None:
        """The storage changes its size in place."""
        if id(storage) in self._live:
            self._total += size - self._live[id(storage)]
            self._live[id(storage)] = size
            self.peak_bytes = max(self.peak_bytes, self._total)

    def _freed(self, number: int) -> None:
        self._total -= self._live.pop(number)
