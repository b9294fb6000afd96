"""Which rectangles of which tensors a tensor-parallel rank holds, and where: intervals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.rules.rule import Block, Rule, Shape

Index = tuple[slice, ...]
Read = Callable[[int, Index], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One rank's place in tensor parallelism, and the vocabulary as padded for it (rows over all ranks).

    Which experts a rank holds is said by the names of its tensors; how each of them is cut, by ``etp``.
    """

    tp_rank: int = 0
    tp_size: int = 1
    etp_rank: int = 0
    etp_size: int = 1
    padded_vocab_size: int

    def place(self, rule: Rule) -> tuple[int, int]:
        """Rank and number of ranks among which the rule's tensor is cut."""
        return (self.etp_rank, self.etp_size) if rule.of_expert else (self.tp_rank, self.tp_size)


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of the tensor of part number ``part`` and the equally large one of this rank's own that it fills."""

    part: int
    hf: Index
    local: Index
    transposed: bool = False
    stacked: bool = False

    def view(self, tensor: Tensor) -> Tensor:
        """The rectangle of this rank's ``tensor``, shaped as the one of the Hugging Face tensor; shares its memory."""
        found = tensor[self.local]
        if self.transposed:
            found = found.mT if found.dim() > 1 else found
        return found[None] if self.stacked else found


def whole(arch: Architecture) -> Layout:
    """The layout of a model that is not cut, and whose vocabulary is not padded."""
    return Layout(padded_vocab_size=arch.vocab_size)


def local_shape(rule: Rule, arch: Architecture, layout: Layout) -> Shape:
    """Shape of this rank's share of the rule's tensor, vocabulary padding included."""
    shape = list(_padded_shape(rule, arch, layout))
    axis = _axis(rule)
    shape[axis] = sum(length for _, length in _spans(rule, shape[axis], layout))
    return tuple(shape)


def held(rule: Rule, arch: Architecture, layout: Layout) -> list[tuple[Index, Index]]:
    """Rectangles of the canonical tensor that this rank holds, padding left out, and where they lie in its own."""
    axis = _axis(rule)
    rows = rule.canonical_shape(arch)[axis]
    found: list[tuple[Index, Index]] = []
    local = 0
    for start, length in _spans(rule, _padded_shape(rule, arch, layout)[axis], layout):
        real = min(length, rows - start)
        if real > 0:
            before = (slice(None),) * axis
            found.append(((*before, slice(start, start + real)), (*before, slice(local, local + real))))
        local += length
    return found


def pieces(rule: Rule, arch: Architecture, layout: Layout, expert: int = 0) -> list[Piece]:
    """What this rank holds, ordered by part. Over all ranks every element of every part appears (once, unless whole).

    With fewer query groups than ranks a group is cut across ranks wherever the even cut falls, as Megatron-Core wants
    it; rows of the vocabulary padding have no piece. ``expert`` is the number of the expert in the whole layer.
    """
    found: list[Piece] = []
    for mine, local in held(rule, arch, layout):
        found += pieces_of(rule, arch, mine, local, expert)
    return sorted(found, key=lambda piece: piece.part)


def overlap(mine: Index, local: Index, rows: slice) -> tuple[Index, Index] | None:
    """What of the rectangle ``mine``, which lies at ``local`` in a rank's tensor, is in these rows of the whole one.

    Returns:
        Where it lies among the rows, and where in the rank's tensor; None if there is nothing.
    """
    low, high = max(mine[0].start or 0, rows.start), rows.stop if mine[0].stop is None else min(mine[0].stop, rows.stop)
    if low >= high:
        return None
    shift = (local[0].start or 0) - (mine[0].start or 0)
    here = (slice(low - rows.start, high - rows.start), *mine[1:])
    return here, (slice(low + shift, high + shift), *local[1:])


def pieces_of(rule: Rule, arch: Architecture, mine: Index, local: Index, expert: int = 0) -> list[Piece]:
    """Where the rectangle ``mine`` of the canonical tensor lies in the Hugging Face tensors.

    Args:
        rule: whose tensor it is.
        arch: the model.
        mine: rows, and columns where it has not all of them.
        local: where the rectangle lies in the tensor that the pieces are to fill.
        expert: the number of the expert in the whole layer.
    """
    shape = rule.canonical_shape(arch)
    rows, *columns = _bounded(mine, shape)
    local_rows, *local_columns = _bounded(local, shape)
    shift = local_rows.start - rows.start
    found: list[Piece] = []
    for b in rule.blocks(arch):
        low, high = max(b.at, rows.start), min(b.at + b.length, rows.stop)
        if low >= high:
            continue
        hf: Index = (_rows(b, low - b.at, high - b.at), *columns)
        if rule.transposed:
            hf = hf[::-1]
        if rule.stacked:
            hf = (slice(expert, expert + 1), *hf)
        here = (slice(low + shift, high + shift), *local_columns)
        found.append(Piece(b.part, hf, here, rule.transposed, rule.stacked))
    return found


def weave(rule: Rule, arch: Architecture, read: Read, expert: int = 0) -> Tensor:
    """The whole canonical tensor; ``read(part, index)`` gives a rectangle of the tensor that the part lies in."""
    found: Tensor | None = None
    for piece in pieces(rule, arch, whole(arch), expert):
        rectangle = read(piece.part, piece.hf)
        if found is None:
            found = torch.empty(rule.canonical_shape(arch), dtype=rectangle.dtype)
        piece.view(found).copy_(rectangle)
    assert found is not None
    return found


def check_tp_size(arch: Architecture, tp_size: int) -> None:
    """Refuse a tensor-parallel size that the heads, query groups or MLP cannot be cut into.

    Raises:
        UsageError: naming the number that does not divide and the sizes that would.
    """
    if (why := _misfit(arch, tp_size)) is None:
        return
    fitting = [tp for tp in range(1, arch.num_attention_heads + 1) if _misfit(arch, tp) is None]
    raise UsageError(f"tp={tp_size} {why} ({arch.family}). Use {_one_of(fitting)}.")


def check_expert_sizes(arch: Architecture, ep_size: int, etp_size: int) -> None:
    """Refuse sizes that the experts cannot be dealt out or cut into.

    Raises:
        UsageError: naming the number that does not divide and the sizes that would.
    """
    if arch.moe is None:
        if ep_size > 1 or etp_size > 1:
            raise UsageError(f"ep={ep_size} and etp={etp_size} are for experts, and {arch.family} has none. Use 1.")
        return
    experts, width = arch.moe.num_experts, arch.moe.ffn_hidden_size
    if ep_size < 1 or experts % ep_size:
        fitting = [ep for ep in range(1, experts + 1) if experts % ep == 0]
        raise UsageError(f"ep={ep_size} does not divide num_experts={experts} ({arch.family}). Use {_one_of(fitting)}.")
    if etp_size < 1 or width % etp_size:
        fitting = [etp for etp in range(1, arch.num_attention_heads + 1) if width % etp == 0]
        raise UsageError(
            f"etp={etp_size} does not divide the experts' width {width} ({arch.family}). Use {_one_of(fitting)}."
        )


def _one_of(sizes: list[int]) -> str:
    """``1, 2 or 4``."""
    words = list(map(str, sizes))
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _misfit(arch: Architecture, tp: int) -> str | None:
    moe = arch.moe
    has_dense = moe is None or bool(moe.dense_layers)
    wanted = {"num_attention_heads": arch.num_attention_heads}
    wanted |= {"ffn_hidden_size": arch.ffn_hidden_size} if has_dense else {}
    wanted |= {"shared_ffn_hidden_size": moe.shared_ffn_hidden_size} if moe is not None else {}
    for name, size in wanted.items():
        if tp < 1 or size % tp:
            return f"does not divide {name}={size}"
    if arch.mla is not None:
        return None
    groups = arch.num_query_groups
    if groups % tp and tp % groups:
        return f"does not divide num_query_groups={groups}"
    qkv_rows = (arch.num_attention_heads + 2 * groups) * arch.kv_channels
    return f"does not divide the {qkv_rows} rows of query, key and value" if qkv_rows % tp else None


def _bounded(index: Index, shape: Shape) -> list[slice]:
    """The index with a start and a stop for every dimension."""
    full = [*index, *[slice(None)] * (len(shape) - len(index))]
    return [
        slice(cut.start or 0, size if cut.stop is None else cut.stop) for cut, size in zip(full, shape, strict=True)
    ]


def _rows(block: Block, low: int, high: int) -> slice:
    """Rows ``low`` to ``high`` of a block, where they lie in the tensor of its part."""
    step = block.step
    start = block.start + low * step
    return (
        slice(start, block.start + high * step)
        if step == 1
        else slice(start, start + (high - low - 1) * step + 1, step)
    )


def _axis(rule: Rule) -> int:
    return 1 if rule.shard == "cols" else 0


def _padded_shape(rule: Rule, arch: Architecture, layout: Layout) -> Shape:
    rows, *tail = rule.canonical_shape(arch)
    return (layout.padded_vocab_size if rule.shard == "vocab" else rows, *tail)


def _spans(rule: Rule, size: int, layout: Layout) -> list[tuple[int, int]]:
    """Intervals ``(start, length)`` of the canonical axis that this rank holds, in the order it holds them."""
    if rule.shard == "whole":
        return [(0, size)]
    rank, ranks = layout.place(rule)
    # gate and up are each cut, so that a rank can multiply its gates with its own ups.
    strips = 2 if rule.shard == "gate_up" else 1
    share, rest = divmod(size, strips * ranks)
    if rest:
        rows = size // strips
        largest = max(tp for tp in range(1, ranks) if rows % tp == 0)
        size_of = f"the {rows} rows or columns of {rule.canonical}"
        kind = "etp" if rule.of_expert else "tp"
        raise UsageError(f"{kind}={ranks} does not divide {size_of}. Use {kind}={largest}.")
    return [(strip * size // strips + rank * share, share) for strip in range(strips)]
