"""Which rectangles of which Hugging Face tensors a tensor-parallel rank holds, and where: intervals, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.rule import Rule, Shape

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One rank's place in tensor parallelism, and the vocabulary as padded for it (rows over all ranks)."""

    tp_rank: int = 0
    tp_size: int = 1
    padded_vocab_size: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of part number ``part`` and the equally large rectangle of this rank's tensor that it fills."""

    part: int
    hf: Index
    local: Index


def local_shape(rule: Rule, arch: Architecture, layout: Layout) -> Shape:
    """Shape of this rank's share of the rule's tensor, vocabulary padding included."""
    shape = list(_padded_shape(rule, arch, layout))
    if rule.shard != "whole":
        axis = _axis(rule)
        shape[axis] = sum(length for _, length in _spans(rule, shape[axis], layout))
    return tuple(shape)


def pieces(rule: Rule, arch: Architecture, layout: Layout) -> list[Piece]:
    """What this rank holds, ordered by part. Over all ranks every element of every part appears (once, unless whole).

    With fewer query groups than ranks a group is cut across ranks wherever the even cut falls, as Megatron-Core wants
    it; rows of the vocabulary padding have no piece.
    """
    axis = _axis(rule)
    spans = _spans(rule, _padded_shape(rule, arch, layout)[axis], layout)
    if axis == 1:
        ((start, length),) = spans
        hf_cols, my_cols = slice(start, start + length), slice(0, length)
        return [
            Piece(b.part, (slice(b.start, b.start + b.length), hf_cols), (slice(b.at, b.at + b.length), my_cols))
            for b in rule.blocks(arch)
        ]
    found: list[Piece] = []
    tail = tuple(slice(0, size) for size in rule.canonical_shape(arch)[1:])
    local = 0
    for start, length in spans:
        for b in rule.blocks(arch):
            low, high = max(b.at, start), min(b.at + b.length, start + length)
            if low < high:
                hf = slice(b.start + low - b.at, b.start + high - b.at)
                mine = slice(local + low - start, local + high - start)
                found.append(Piece(b.part, (hf, *tail), (mine, *tail)))
        local += length
    return sorted(found, key=lambda piece: piece.part)


def check_tp_size(arch: Architecture, tp_size: int) -> None:
    """Refuse a tensor-parallel size that the heads, query groups or MLP cannot be cut into.

    Raises:
        UsageError: naming the number that does not divide and the sizes that would.
    """
    if (why := _misfit(arch, tp_size)) is None:
        return
    fitting = [str(tp) for tp in range(1, arch.num_attention_heads + 1) if _misfit(arch, tp) is None]
    choice = " or ".join(filter(None, [", ".join(fitting[:-1]), fitting[-1]]))
    raise UsageError(f"tp={tp_size} {why} ({arch.family}). Use {choice}.")


def _misfit(arch: Architecture, tp: int) -> str | None:
    for name in ("num_attention_heads", "ffn_hidden_size"):
        if tp < 1 or getattr(arch, name) % tp:
            return f"does not divide {name}={getattr(arch, name)}"
    groups = arch.num_query_groups
    if groups % tp and tp % groups:
        return f"does not divide num_query_groups={groups}"
    qkv_rows = (arch.num_attention_heads + 2 * groups) * arch.kv_channels
    return f"does not divide the {qkv_rows} rows of query, key and value" if qkv_rows % tp else None


def _axis(rule: Rule) -> int:
    return 1 if rule.shard == "cols" else 0


def _padded_shape(rule: Rule, arch: Architecture, layout: Layout) -> Shape:
    rows, *tail = rule.canonical_shape(arch)
    return (layout.padded_vocab_size if rule.shard == "vocab" else rows, *tail)


def _spans(rule: Rule, size: int, layout: Layout) -> list[tuple[int, int]]:
    """Intervals ``(start, length)`` of the canonical axis that this rank holds, in the order it holds them."""
    if rule.shard == "whole":
        return [(0, size)]
    # gate and up are each cut, so that a rank can multiply its gates with its own ups.
    strips = 2 if rule.shard == "gate_up" else 1
    share, rest = divmod(size, strips * layout.tp_size)
    if rest:
        rows = size // strips
        largest = max(tp for tp in range(1, layout.tp_size) if rows % tp == 0)
        size_of = f"the {rows} rows or columns of {rule.canonical}"
        raise UsageError(f"tp={layout.tp_size} does not divide {size_of}. Use tp={largest}.")
    return [(strip * size // strips + layout.tp_rank * share, share) for strip in range(strips)]
