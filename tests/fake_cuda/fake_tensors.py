"""Tensors on the GPU are fake, tensors on the host are real.

A fake tensor has shape, dtype, strides and device. Every operator checks them, and computes nothing. Small integer
tensors also keep their values in host memory: token counts that the host reads are those of a uniform routing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map, tree_map_only

from fake_cuda.gpu import is_pinned, mark_pinned
from fake_cuda.trace import tell

MAX_KNOWN = 1 << 18
"""Elements of the largest tensor whose values are kept."""
_READS = {
    "_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "bincount",
    "equal",
}  # fmt: skip
"""Operators whose result on a GPU depends on values: the host waits for them."""
_INDEXING = {"index", "index_put", "index_put_"}
_NO_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "set_", "resize_",
    "record_stream", "_unsafe_view",
}  # fmt: skip


class FakeGpuMode(TorchDispatchMode):
    """Runs operators on the host for real and those with GPU tensors on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args)
        if any(issubclass(item, DTensor) for item in types):  # its own dispatch calls operators of local tensors
            return NotImplemented
        kwargs = dict(kwargs or {})
        pinned = kwargs.pop("pin_memory", False)
        inputs = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        target = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        name = func.overloadpacket.__name__
        if not any(isinstance(tensor, FakeTensor) for tensor in inputs):
            if target != "cuda":
                out = func(*args, **kwargs)
                return mark_pinned(out) if pinned else out
        elif name in _READS or (name == "repeat_interleave" and len(args) == 1 and kwargs.get("output_size") is None):
            tell("sync", "read", name)
            return self._read(func, args, kwargs)
        elif (name == "_to_copy" and target == "cpu") or (name == "copy_" and not isinstance(args[0], FakeTensor)):
            return _copy_to_host(name, args, kwargs)
        elif name in _INDEXING:
            args = (args[0], self._indices(name, args[1]), *args[2:])
        _watch_copies(name, args, kwargs)
        if func.namespace == "c10d":
            return _exchange(name, func, args)
        all_fake = all(isinstance(tensor, FakeTensor) for tensor in inputs)
        inputs_of_op = (args, kwargs) if all_fake else tree_map(self._on_fake, (args, kwargs))
        with self.fake:
            out = func(*inputs_of_op[0], **inputs_of_op[1])
        if not _is_view(func) and name not in _NO_KERNEL:
            tell("kernel", name)
        tell("made", out)
        _keep_values(name, func, args, kwargs, out, inputs)
        return out

    def _on_fake(self, leaf: Any) -> Any:
        """A fake copy of a host tensor: an operator takes scalars and indices from the host."""
        is_host = isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor)
        return self.fake.from_tensor(leaf) if is_host else leaf

    def _on_gpu(self, values: Tensor) -> Tensor:
        """A fake tensor with known values."""
        with self.fake:
            fake = self.fake.from_tensor(values).to("cuda")
        fake.known = values  # type: ignore[attr-defined]
        return fake

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        values = tree_map_only(FakeTensor, value_of, (args, kwargs))
        return tree_map_only(Tensor, self._on_gpu, func(*values[0], **values[1]))

    def _indices(self, name: str, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """With the numbers of the rows instead of boolean masks, which a GPU reads to allocate the result."""
        results: list[Tensor | None] = []
        for index in indices:
            if isinstance(index, FakeTensor) and index.dtype == torch.bool:
                tell("sync", "read", f"{name} with a mask")
                results += [self._on_gpu(rows) for rows in value_of(index).nonzero(as_tuple=True)]
            else:
                results.append(index)
        return results


def _is_view(func: Any) -> bool:
    """Whether the results alias the inputs without a write."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _copy_to_host(name: str, args: Any, kwargs: Any) -> Tensor:
    if name == "copy_":
        target, source, asynchronous = args[0], args[1], kwargs.get("non_blocking", any(args[2:]))
        target.copy_(value_of(source))
    else:
        source, asynchronous = args[0], kwargs.get("non_blocking", False)
        target = value_of(source).to(kwargs.get("dtype") or source.dtype, copy=True)
    if not asynchronous:
        tell("sync", "to host", name)
    return target


def _watch_copies(name: str, args: Any, kwargs: Any) -> None:
    """Tell of copies to the GPU that block the host: not asked to run asynchronously, or from pageable memory."""
    sources: list[Any] = []
    asynchronous = False
    if name == "_to_copy":
        sources, asynchronous = [args[0]], kwargs.get("non_blocking", False)
    elif name == "copy_":
        sources, asynchronous = [args[1]], kwargs.get("non_blocking", any(args[2:]))
    elif name in _INDEXING:
        sources = [index for index in args[1] if index is not None]
    host = [source for source in sources if source.device.type == "cpu" and source.numel()]
    if host and not (asynchronous and is_pinned(host[0])):
        tell("sync", "to device", name)


def _exchange(name: str, func: Any, args: Any) -> Any:
    """A collective returns at once; in a gather all ranks have the values of this one."""
    if name == "_allgather_base_" and _known([args[1]]):
        shard = value_of(args[1]).flatten()
        args[0].known = shard.repeat(args[0].numel() // shard.numel()).view(args[0].shape)
    fakes: dict[int, Tensor] = {}

    def placeholder(tensor: Tensor) -> Tensor:
        empty = torch.empty(*tensor.shape[:1], 0)  # torch checks the sizes of splits
        fakes[id(empty)] = tensor
        placeholders.append(empty)
        return empty

    placeholders: list[Tensor] = []  # keeps their ids
    out = func(*tree_map_only(Tensor, placeholder, args))
    return tree_map_only(Tensor, lambda tensor: fakes[id(tensor)], out)


def value_of(tensor: Tensor) -> Tensor:
    """The known values, else zeros."""
    known: Tensor | None = getattr(tensor, "known", None)
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if known is None else known


def _keep_values(name: str, func: Any, args: Any, kwargs: Any, out: Any, inputs: list[Tensor]) -> None:
    """Compute integer results on the host too, if the values of all inputs are known; views keep aliasing."""
    outputs = [leaf for leaf in tree_iter(out) if isinstance(leaf, FakeTensor)]
    if name == "topk" and out[1].numel() <= MAX_KNOWN and not _known(inputs):
        # Uniform: consecutive tokens choose consecutive columns.
        out[1].known = (torch.arange(out[1].numel()) % args[0].size(-1)).view(out[1].shape)
        return
    small = all(o.numel() <= MAX_KNOWN and not o.is_floating_point() and not o.is_complex() for o in outputs)
    if not outputs or not small or name.startswith("empty") or not _known(inputs):
        for tensor in outputs if func._schema.is_mutable else ():
            tensor.known = None  # type: ignore[attr-defined]
        return
    keywords = {key: value for key, value in kwargs.items() if key != "device"}
    values = tree_map_only(FakeTensor, value_of, (args, keywords))
    for fake, real in zip(outputs, tree_iter(func(*values[0], **values[1])), strict=False):
        fake.known = real  # type: ignore[attr-defined]


def _known(inputs: list[Tensor]) -> bool:
    return all(
        getattr(tensor, "known", None) is not None if isinstance(tensor, FakeTensor) else tensor.numel() <= MAX_KNOWN
        for tensor in inputs
    )
