"""A rule: how some tensors of a Hugging Face model lie in one tensor of Megatron-Core; pure data, both directions.

Every arrangement used here is a *weave*: each part is cut along its rows into the same number of strands, and the
strands are laid in turn. One strand is plain concatenation (a copy, or gate above up); one strand for each query
group is Megatron's fused QKV, ``q q k v | q q k v | ...``. A weave only moves blocks of rows, so its inverse is the
same list of blocks read the other way, and cutting it for tensor parallelism is an intersection of intervals.

Shapes are tuples of symbols: V vocabulary, H hidden, F ffn, N heads, G query groups, D head width;
``N*D`` is a product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from isthmus.families.architecture import Architecture

Shard = Literal["whole", "rows", "cols", "vocab", "heads", "gate_up"]
Init = Literal["normal", "ones", "zeros"]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """``length`` rows that start at ``start`` in part number ``part`` and at ``at`` in the canonical tensor."""

    part: int
    start: int
    at: int
    length: int


@dataclass(frozen=True, slots=True)
class Part:
    """One Hugging Face tensor; ``{layer}`` in its name stands for the layer number."""

    name: str
    symbols: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How ``parts`` are woven into the tensor ``canonical``, and how that tensor is cut over tensor-parallel ranks."""

    canonical: str
    """Megatron-Core's unfused name, with the layer number counted over the whole model."""
    parts: tuple[Part, ...]
    shard: Shard = "whole"
    strands: str = "1"
    """Number of strands each part is cut into, as a symbol."""
    init: Init = "normal"
    """What a model that starts from nothing puts here."""
    when: str | None = None
    """The rule holds only where this field of the Architecture is true."""
    unless: str | None = None
    """The rule holds only where this field of the Architecture is false."""
    alias: bool = False
    """The parts belong to another rule already: fill this tensor from them, but do not export it."""

    def holds(self, arch: Architecture) -> bool:
        """Whether a model of this architecture has the tensor."""
        return (self.when is None or bool(getattr(arch, self.when))) and (
            self.unless is None or not getattr(arch, self.unless)
        )

    def part_shapes(self, arch: Architecture) -> list[Shape]:
        """The shape of each part, in numbers."""
        sizes = dims(arch)
        return [tuple(product(symbol, sizes) for symbol in part.symbols) for part in self.parts]

    def canonical_shape(self, arch: Architecture) -> Shape:
        """Shape of the whole woven tensor, without vocabulary padding: the rows of the parts added up."""
        shapes = self.part_shapes(arch)
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def blocks(self, arch: Architecture) -> list[Block]:
        """Where every row of every part lies, in canonical order; together the blocks cover both sides exactly once."""
        strands = product(self.strands, dims(arch))
        lengths = [shape[0] // strands for shape in self.part_shapes(arch)]
        blocks, at = [], 0
        for strand in range(strands):
            for part, length in enumerate(lengths):
                blocks.append(Block(part, strand * length, at, length))
                at += length
        return blocks

    def weave(self, parts: Sequence[Tensor], arch: Architecture) -> Tensor:
        """Hugging Face parts -> canonical tensor."""
        return torch.cat([parts[b.part][b.start : b.start + b.length] for b in self.blocks(arch)])

    def unweave(self, canonical: Tensor, arch: Architecture) -> list[Tensor]:
        """Canonical tensor -> Hugging Face parts; the inverse of ``weave``."""
        rows: list[list[Tensor]] = [[] for _ in self.parts]
        for b in self.blocks(arch):
            rows[b.part].append(canonical[b.at : b.at + b.length])
        return [torch.cat(pieces) for pieces in rows]


def dims(arch: Architecture) -> dict[str, int]:
    """The numbers behind the symbols."""
    return {
        "V": arch.vocab_size,
        "H": arch.hidden_size,
        "F": arch.ffn_hidden_size,
        "N": arch.num_attention_heads,
        "G": arch.num_query_groups,
        "D": arch.kv_channels,
        "1": 1,
    }


def product(symbol: str, sizes: Mapping[str, int]) -> int:
    """``N*D`` -> the number of heads times their width."""
    return math.prod(sizes[factor] for factor in symbol.split("*"))


def copy(
    canonical: str,
    hf: str,
    *symbols: str,
    shard: Shard = "whole",
    init: Init = "normal",
    when: str | None = None,
    unless: str | None = None,
    alias: bool = False,
) -> Rule:
    """The same tensor under another name."""
    parts = (Part(hf, symbols),)
    return Rule(canonical=canonical, parts=parts, shard=shard, init=init, when=when, unless=unless, alias=alias)


def qkv(canonical: str, q: str, k: str, v: str, *tail: str, init: Init = "normal") -> Rule:
    """Query, key and value projections (or their biases), woven by query group."""
    parts = (Part(q, ("N*D", *tail)), Part(k, ("G*D", *tail)), Part(v, ("G*D", *tail)))
    return Rule(canonical=canonical, parts=parts, shard="heads", strands="G", init=init)


def gate_up(canonical: str, gate: str, up: str, *tail: str) -> Rule:
    """The gate of a gated MLP above its up projection."""
    return Rule(canonical=canonical, parts=(Part(gate, ("F", *tail)), Part(up, ("F", *tail))), shard="gate_up")
