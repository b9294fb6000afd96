"""A rule: an invertible mapping between Hugging Face tensors and one Megatron-Core tensor, as data.

Each part is split along its rows into the same number of strands, and the strands of all parts are interleaved. One
strand is plain concatenation (a copy, or gate and up projection); one strand per query group is Megatron's fused QKV,
``q q k v | q q k v | ...``. A rule only moves blocks of rows, so its inverse swaps source and destination, and a
tensor-parallel shard is an intersection of row ranges.

Parts with the same name are sections of one Hugging Face tensor, which may repeat (``hf_strands``). Shapes are tuples
of symbols, ``N*D`` is a product:

    V vocabulary, H hidden size, F feed-forward width, P rows of learned positions, N heads, G query groups, D head
    dim, Vh head dim of values, W rows of QKV (with a ``w``, such as Nw and Vhw: of sliding-window layers), E experts,
    X width of an expert, Hx of its inputs, S width of the shared experts. MLA: Rq and Rk are the LoRA ranks of
    queries and of keys and values, Kd is Rk plus the rotary dim, Qh is the head dim of queries, Kv is a head's non-
    rotary key dim plus its value dim. Delta net: Lk and Lv are the channels of all keys and values, Lm and Ln the
    numbers of key and value heads, Ld is the value dim of a head, Lc the kernel of the convolution. Indexer: Ni and
    Di are its heads and their dim. Mamba-2: Mi are the channels, Mg the channels of B of all groups, Mh the heads, Mk
    the kernel. Mamba-1: Ci are the channels, Cs is the state size, Cr the rank of the time steps, Cx is Cr plus twice
    Cs, Ck the kernel. Sk is the kernel of a short convolution. Iw is the width of the inputs of a layer, Ia of those of
    all layers.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

from isthmus.families.architecture import WINDOWED, Architecture

Shard = Literal["whole", "rows", "cols", "vocab", "heads", "gate_up", "parts", "third"]
"""``gate_up``: both halves of the rows, each by rows; ``parts``: each part of the rule, by rows;
``third``: by the third axis."""
Init = Literal["normal", "ones", "zeros", "plain_ones", "log_decay", "time_step"] | float
"""``ones`` is a gain of one, which is 0 in models with zero-centered norms; ``plain_ones`` is 1. ``log_decay``:
logarithm of a uniform number from 0.01 to 16; ``time_step``: inverse softplus of a number whose logarithm is uniform,
from 0.001 to 0.1 (arXiv 2405.21060); a number: that constant."""
Shape = tuple[int, ...]
_ATTENTION = ("N", "G", "D", "Vh", "W")


@dataclass(frozen=True, slots=True)
class RowBlock:
    """``length`` canonical rows from row ``at``: rows ``start``, ``start + step``, ... of part ``part``."""

    part: int
    start: int
    at: int
    length: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class HfPart:
    """A Hugging Face tensor or, if several parts have the same name, a section of it.

    The name has placeholders ``{layer}``, ``{expert}``, and ``{mtp}`` or ``{depth}`` for MTP layers, numbered after the
    last layer or from 0.
    ``symbols`` is the shape in Megatron-Core, neither transposed nor stacked.
    """

    name: str
    symbols: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How ``parts`` form the tensor ``canonical``, and how it is sharded over tensor-parallel ranks."""

    canonical: str
    """Megatron-Core's unfused name; layers and experts have global numbers."""
    parts: tuple[HfPart, ...]
    shard: Shard = "whole"
    strands: str = "1"
    """Number of strands of each part, as a symbol."""
    hf_strands: str = "1"
    """Number of times that the sections of a Hugging Face tensor repeat in it, as a symbol."""
    hf_order: tuple[int, ...] = ()
    """Numbers of the parts in the order of their sections in a Hugging Face tensor; empty: as they are."""
    interleaved: bool = False
    """The rows of parts with the same name alternate."""
    transposed: bool = False
    """The Hugging Face tensor is [in, out]."""
    stacked: bool = False
    """The Hugging Face tensor has an extra first axis: the layer's experts, or 1 if it belongs to no expert."""
    per_head: str | None = None
    """Symbol of the number of heads. Each has a tensor like the only part, with its number as ``{head}`` in the name,
    or with ``stacked`` a row of one tensor."""
    init: Init = "normal"
    """Random initialization."""
    scalar: bool = False
    """The Hugging Face tensor has no axes; in Megatron-Core it is [1]."""
    dtype: Literal["float32"] | None = None
    """Dtype in Megatron-Core, if it is not the model's. Conversions to a narrower dtype keep that of a file."""
    when: str | None = None
    """The rule applies only if this condition is true, see :func:`is_true`."""
    unless: str | None = None
    layers: str = "all"
    """Kinds of the layers that have the tensor, separated by ``|``, see
    :attr:`isthmus.families.blocks.layer.Layer.kinds`."""
    trained: bool = True
    """Whether gradients reach the tensor."""
    recut: bool = False
    """Files may have the rows of all parts cut at other places."""
    alias: bool = False
    """Another rule exports the parts; this tensor is only imported from them."""

    def applies(self, arch: Architecture) -> bool:
        """Whether a model of this architecture has the tensor."""
        if self.layers == "moe" and arch.moe is None:
            return False
        return (not self.when or is_true(arch, self.when)) and not (self.unless and is_true(arch, self.unless))

    def applies_to_layer(self, kinds: Container[str]) -> bool:
        """Whether a layer of these kinds has the tensor."""
        return self.layers == "all" or any(kind in kinds for kind in self.layers.split("|"))

    @property
    def is_expert(self) -> bool:
        """Whether the tensor belongs to one routed expert; such tensors are sharded by expert tensor parallelism."""
        return "{expert}" in self.canonical

    def for_heads(self, arch: Architecture) -> Rule:
        """This rule with a part for each head."""
        if self.per_head is None:
            return self
        (part,), heads = self.parts, range(symbol_size(self.per_head, arch.symbols))
        parts = tuple(HfPart(part.name.replace("{head}", str(head)), part.symbols) for head in heads)
        return replace(self, parts=parts)

    def part_shapes(self, arch: Architecture) -> list[Shape]:
        """Shapes in Megatron-Core."""
        sizes = arch.symbols
        return [tuple(symbol_size(symbol, sizes) for symbol in part.symbols) for part in self.parts]

    def canonical_shape(self, arch: Architecture) -> Shape:
        """The unsharded shape without vocabulary padding."""
        shapes = self.part_shapes(arch)
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def hf_shapes(self, arch: Architecture) -> dict[str, Shape]:
        """Shapes in the file by name; names keep their placeholders."""
        shapes: dict[str, Shape] = {}
        for part, (rows, *tail) in zip(self.parts, self.part_shapes(arch), strict=True):
            shapes[part.name] = (shapes[part.name][0] + rows if part.name in shapes else rows, *tail)
        if self.transposed:
            shapes = {name: shape[::-1] for name, shape in shapes.items()}
        if self.scalar:
            shapes = dict.fromkeys(shapes, ())
        if self.stacked and self.per_head is not None:
            shapes = {name: (len(self.parts), rows // len(self.parts)) for name, (rows, *_) in shapes.items()}
        elif self.stacked:
            shapes = {name: (arch.symbols["E"] if self.is_expert else 1, *shape) for name, shape in shapes.items()}
        return shapes

    def blocks(self, arch: Architecture) -> list[RowBlock]:
        """All rows in canonical order; the blocks cover both sides exactly once."""
        sizes = arch.symbols
        strands = symbol_size(self.strands, sizes)
        rows = [shape[0] for shape in self.part_shapes(arch)]
        blocks, at = [], 0
        for strand in range(strands):
            for part, total in enumerate(rows):
                length = total // strands
                for start, run, step in self._hf_runs(part, rows, strand * length, length, sizes):
                    blocks.append(RowBlock(part, start, at, run, step))
                    at += run
        return blocks

    def _hf_runs(
        self, part: int, rows: Sequence[int], first: int, length: int, sizes: Mapping[str, int]
    ) -> Iterator[tuple[int, int, int]]:
        """Start, length and step in the Hugging Face tensor of ``length`` rows of a part, from its row ``first``."""
        if self.interleaved:
            yield part + first * len(self.parts), length, len(self.parts)
            return
        order = self.hf_order or range(len(rows))
        sections = [other for other in order if self.parts[other].name == self.parts[part].name]
        repeats = symbol_size(self.hf_strands, sizes) if len(sections) > 1 else 1
        section_rows, all_sections = rows[part] // repeats, sum(rows[other] for other in sections) // repeats
        before = sum(rows[other] for other in sections[: sections.index(part)]) // repeats
        end = first + length
        while first < end:
            repeat, inside = divmod(first, section_rows)
            run = min(end - first, section_rows - inside)
            yield repeat * all_sections + before + inside, run, 1
            first += run


def symbol_size(symbol: str, sizes: Mapping[str, int]) -> int:
    """The size of a symbol or of a product such as ``N*D``."""
    return math.prod(sizes[factor] for factor in symbol.split("*"))


def is_true(arch: Architecture, condition: str) -> bool:
    """Evaluate a condition such as ``mlp_bias and form=post|sandwich``.

    A field without values must be true; with values it must be one of them.
    """

    def is_satisfied(term: str) -> bool:
        path, _, values = term.partition("=")
        value = arch.setting(path)
        return value in values.split("|") if values else bool(value)

    return all(map(is_satisfied, condition.split(" and ")))


def copy(canonical: str, hf: str, *symbols: str, **fields: Any) -> Rule:
    """The same tensor under another name."""
    return Rule(canonical=canonical, parts=(HfPart(hf, symbols),), **fields)


def qkv(canonical: str, q: str, k: str, v: str, *tail: str, **fields: Any) -> Rule:
    """Fused QKV weights or biases, grouped by query group."""
    parts = (HfPart(q, ("N*D", *tail)), HfPart(k, ("G*D", *tail)), HfPart(v, ("G*Vh", *tail)))
    return Rule(canonical=canonical, parts=parts, shard="heads", strands="G", **fields)


def qk(canonical: str, q: str, k: str, *tail: str, **fields: Any) -> Rule:
    """:func:`qkv` without values, which are the keys."""
    parts = (HfPart(q, ("N*D", *tail)), HfPart(k, ("G*D", *tail)))
    return Rule(canonical=canonical, parts=parts, shard="heads", strands="G", **fields)


def gated_qkv(canonical: str, q: str, k: str, v: str, *tail: str, **fields: Any) -> Rule:
    """:func:`qkv` with gates, which follow the queries: of a group in Megatron-Core, of a head in ``q``."""
    parts = (HfPart(q, ("N*D", *tail)), HfPart(q, ("N*D", *tail)), HfPart(k, ("G*D", *tail)), HfPart(v, ("G*D", *tail)))
    return Rule(canonical=canonical, parts=parts, shard="heads", strands="G", hf_strands="N", **fields)


def gate_up(canonical: str, gate: str, up: str, *tail: str, width: str = "F", **fields: Any) -> Rule:
    """The rows of the gate projection, then those of the up projection."""
    parts = (HfPart(gate, (width, *tail)), HfPart(up, (width, *tail)))
    return Rule(canonical=canonical, parts=parts, shard="gate_up", **fields)


def renamed(rules: tuple[Rule, ...], names: Mapping[str, str]) -> tuple[Rule, ...]:
    """Replace substrings of the Hugging Face names."""

    def rename(part: HfPart) -> HfPart:
        return HfPart(reduce(lambda name, pair: name.replace(*pair), names.items(), part.name), part.symbols)

    return tuple(replace(rule, parts=tuple(map(rename, rule.parts))) for rule in rules)


def by_window(*rules: Rule) -> tuple[Rule, ...]:
    """Rules of attention for layers with full attention, then with the sizes of sliding-window layers for those."""

    def windowed_symbol(symbol: str) -> str:
        return "*".join(name + WINDOWED if name in _ATTENTION else name for name in symbol.split("*"))

    windowed = (
        replace(
            rule,
            strands=windowed_symbol(rule.strands),
            parts=tuple(HfPart(part.name, tuple(map(windowed_symbol, part.symbols))) for part in rule.parts),
        )
        for rule in rules
    )
    return (*in_layers("full", *rules), *in_layers("windowed", *windowed))


def where(condition: str, *rules: Rule) -> tuple[Rule, ...]:
    """Add a condition to rules."""
    return tuple(replace(rule, when=" and ".join(filter(None, (rule.when, condition)))) for rule in rules)


def in_layers(kinds: str, *rules: Rule) -> tuple[Rule, ...]:
    """Restrict rules to layers of some kinds, such as ``attention`` or ``dense``."""
    return tuple(replace(rule, layers=kinds) for rule in rules)
