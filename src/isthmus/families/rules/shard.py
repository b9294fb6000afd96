"""The rows and columns of each tensor on a tensor-parallel rank, as intervals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.rules.rule import RowBlock, Rule, Shape

Index = tuple[slice, ...]
Read = Callable[[int, Index], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    tp_rank: int = 0
    tp_size: int = 1
    etp_rank: int = 0
    etp_size: int = 1
    padded_vocab_size: int

    def rank_and_size(self, rule: Rule) -> tuple[int, int]:
        return (self.etp_rank, self.etp_size) if rule.is_expert else (self.tp_rank, self.tp_size)


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A rectangle of the Hugging Face tensor of part ``part``, and the same elements in this rank's tensor."""

    part: int
    hf: Index
    local: Index
    transposed: bool = False
    stacked: bool = False
    scalar: bool = False

    def view(self, tensor: Tensor) -> Tensor:
        """A view of this rank's ``tensor``, in the shape of the Hugging Face rectangle."""
        view = tensor[self.local]
        if self.scalar:
            return view.view(())
        if self.transposed:
            view = view.mT if view.dim() > 1 else view
        return view[None] if self.stacked else view


def unsharded(arch: Architecture) -> Layout:
    """One rank without vocabulary padding."""
    return Layout(padded_vocab_size=arch.vocab_size)


def local_shape(rule: Rule, arch: Architecture, layout: Layout) -> Shape:
    """Shape of this rank's shard, with vocabulary padding."""
    shape = list(_padded_shape(rule, arch, layout))
    axis = _axis(rule)
    shape[axis] = sum(length for _, length in _spans(rule, arch, shape[axis], layout))
    return tuple(shape)


def owned_slices(rule: Rule, arch: Architecture, layout: Layout) -> list[tuple[Index, Index]]:
    """This rank's rectangles of the canonical tensor, without padding, and their positions in its shard."""
    axis = _axis(rule)
    rows = rule.canonical_shape(arch)[axis]
    slices: list[tuple[Index, Index]] = []
    local = 0
    for start, length in _spans(rule, arch, _padded_shape(rule, arch, layout)[axis], layout):
        real = min(length, rows - start)
        if real > 0:
            before = (slice(None),) * axis
            slices.append(((*before, slice(start, start + real)), (*before, slice(local, local + real))))
        local += length
    return slices


def tensor_slices(rule: Rule, arch: Architecture, layout: Layout, expert: int = 0) -> list[TensorSlice]:
    """This rank's slices of the Hugging Face tensors, ordered by part.

    Over all ranks every element appears once, or on every rank if the tensor is not sharded. With fewer query groups
    than ranks, a group is split across ranks at the even boundaries that Megatron-Core expects. ``expert`` is the
    number of the expert in the layer.
    """
    slices: list[TensorSlice] = []
    for owned, local in owned_slices(rule, arch, layout):
        slices += hf_slices(rule, arch, owned, local, expert)
    return sorted(slices, key=lambda piece: piece.part)


def intersect_rows(owned: Index, local: Index, rows: slice) -> tuple[Index, Index] | None:
    """Intersect a rectangle with rows of the canonical tensor; ``local`` is its position in the rank's shard.

    Returns the intersection relative to ``rows`` and in the shard, or None if it is empty.
    """
    low = max(owned[0].start or 0, rows.start)
    high = rows.stop if owned[0].stop is None else min(owned[0].stop, rows.stop)
    if low >= high:
        return None
    shift = (local[0].start or 0) - (owned[0].start or 0)
    return (slice(low - rows.start, high - rows.start), *owned[1:]), (slice(low + shift, high + shift), *local[1:])


def hf_slices(rule: Rule, arch: Architecture, owned: Index, local: Index, expert: int = 0) -> list[TensorSlice]:
    """The slices of the Hugging Face tensors that form the rectangle ``owned`` of the canonical tensor.

    ``local`` is the position of the rectangle in the destination, ``expert`` the number of the expert in the layer.
    """
    shape = rule.canonical_shape(arch)
    rows, *columns = _bounded(owned, shape)
    local_rows, *local_columns = _bounded(local, shape)
    shift = local_rows.start - rows.start
    slices: list[TensorSlice] = []
    for b in rule.blocks(arch):
        low, high = max(b.at, rows.start), min(b.at + b.length, rows.stop)
        if low >= high:
            continue
        hf: Index = (_hf_rows(b, low - b.at, high - b.at), *columns)
        if rule.transposed:
            hf = hf[::-1]
        if rule.stacked and rule.per_head is not None:
            before = b.part * (shape[0] // len(rule.parts))  # the rows of a head count from its first
            hf = (slice(b.part, b.part + 1), slice(hf[0].start - before, hf[0].stop - before))
        elif rule.stacked:
            hf = (slice(expert, expert + 1), *hf)
        if rule.scalar:
            hf = ()
        here = (slice(low + shift, high + shift), *local_columns)
        slices.append(TensorSlice(b.part, hf, here, rule.transposed, rule.stacked, rule.scalar))
    return slices


def assemble(rule: Rule, arch: Architecture, read: Read, expert: int = 0) -> Tensor:
    """The unsharded canonical tensor; ``read(part, index)`` returns a rectangle of a Hugging Face tensor."""
    tensor: Tensor | None = None
    for piece in tensor_slices(rule, arch, unsharded(arch), expert):
        rectangle = read(piece.part, piece.hf)
        if tensor is None:
            tensor = torch.empty(rule.canonical_shape(arch), dtype=rectangle.dtype)
        piece.view(tensor).copy_(rectangle)
    assert tensor is not None
    return tensor


def check_tp_size(arch: Architecture, tp_size: int) -> None:
    """Raise UsageError unless heads, query groups and feed-forward width are divisible by ``tp_size``."""
    if (why := _tp_mismatch(arch, tp_size)) is None:
        return
    fitting = [tp for tp in range(1, arch.attention.num_attention_heads + 1) if _tp_mismatch(arch, tp) is None]
    raise UsageError(f"tp={tp_size} {why} ({arch.family}). Use {_choices(fitting)}.")


def check_expert_sizes(arch: Architecture, ep_size: int, etp_size: int) -> None:
    """Raise UsageError unless number and width of experts are divisible by the expert-parallel sizes."""
    if arch.moe is None:
        if ep_size > 1 or etp_size > 1:
            raise UsageError(f"ep={ep_size} and etp={etp_size} are for experts, and {arch.family} has none. Use 1.")
        return
    experts, width = arch.moe.num_experts, arch.moe.ffn_hidden_size
    if ep_size < 1 or experts % ep_size:
        fitting = [ep for ep in range(1, experts + 1) if experts % ep == 0]
        raise UsageError(
            f"ep={ep_size} does not divide num_experts={experts} ({arch.family}). Use {_choices(fitting)}."
        )
    if etp_size < 1 or width % etp_size:
        fitting = [etp for etp in range(1, arch.attention.num_attention_heads + 1) if width % etp == 0]
        raise UsageError(
            f"etp={etp_size} does not divide the experts' width {width} ({arch.family}). Use {_choices(fitting)}."
        )


def _choices(sizes: list[int]) -> str:
    """``1, 2 or 4``."""
    words = list(map(str, sizes))
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _tp_mismatch(arch: Architecture, tp: int) -> str | None:
    """Why ``tp`` ranks cannot share some block of the model."""
    blocks = (*arch.attention_kinds, arch.mlp if arch.has_dense_mlp else None, arch.moe, *arch.recurrences)
    reasons = (block.tp_mismatch(tp) for block in blocks if block is not None)
    return next(filter(None, reasons), None)


def _bounded(index: Index, shape: Shape) -> list[slice]:
    full = [*index, *[slice(None)] * (len(shape) - len(index))]
    return [
        slice(cut.start or 0, size if cut.stop is None else cut.stop) for cut, size in zip(full, shape, strict=True)
    ]


def _hf_rows(block: RowBlock, low: int, high: int) -> slice:
    start = block.start + low * block.step
    return slice(start, start + (high - low - 1) * block.step + 1, block.step)


def _axis(rule: Rule) -> int:
    return {"cols": 1, "third": 2}.get(rule.shard, 0)


def _padded_shape(rule: Rule, arch: Architecture, layout: Layout) -> Shape:
    rows, *tail = rule.canonical_shape(arch)
    return (layout.padded_vocab_size if rule.shard == "vocab" else rows, *tail)


def _spans(rule: Rule, arch: Architecture, size: int, layout: Layout) -> list[tuple[int, int]]:
    """This rank's ``(start, length)`` intervals of the sharded axis, in shard order."""
    if rule.shard == "whole":
        return [(0, size)]
    rank, ranks = layout.rank_and_size(rule)
    # Gate and up projection are sharded separately: a rank needs the same rows of both.
    strips = [size // 2] * 2 if rule.shard == "gate_up" else [size]
    if rule.shard == "parts":
        strips = [shape[0] for shape in rule.part_shapes(arch)]
    if rows := next((rows for rows in strips if rows % ranks), None):
        largest = max(tp for tp in range(1, ranks) if rows % tp == 0)
        size_of = f"the {rows} rows or columns of {rule.canonical}"
        kind = "etp" if rule.is_expert else "tp"
        raise UsageError(f"{kind}={ranks} does not divide {size_of}. Use {kind}={largest}.")
    starts = accumulate(strips, initial=0)
    return [(start + rank * rows // ranks, rows // ranks) for start, rows in zip(starts, strips, strict=False)]
