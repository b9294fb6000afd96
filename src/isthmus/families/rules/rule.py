"""A rule: how some tensors of a Hugging Face model lie in one tensor of Megatron-Core; pure data, both directions.

Every arrangement used here is a *weave*: each part is cut along its rows into the same number of strands, and the
strands are laid in turn. One strand is plain concatenation (a copy, or gate above up); one strand for each query
group is Megatron's fused QKV, ``q q k v | q q k v | ...``. A weave only moves blocks of rows, so its inverse is the
same list of blocks read the other way, and cutting it for tensor parallelism is an intersection of intervals.

What the Hugging Face side does differently is said on the rule: parts of the same name lie in one tensor, one after
the other (or row by row in turns, ``interleaved``); ``transposed`` tensors are [in, out]; ``stacked`` ones have all
experts of a layer along an axis before the others.

Shapes are tuples of symbols, see :func:`dims`; ``N*D`` is a product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

from isthmus.families.architecture import Architecture

Shard = Literal["whole", "rows", "cols", "vocab", "heads", "gate_up"]
Init = Literal["normal", "ones", "zeros"]
Layers = Literal["all", "dense", "moe"]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """``length`` rows at ``at`` of the canonical tensor, and where they lie in the tensor of part number ``part``.

    There they start at ``start`` and are ``step`` rows apart.
    """

    part: int
    start: int
    at: int
    length: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class Part:
    """One Hugging Face tensor or, where several parts have the same name, one section of it.

    ``{layer}``, ``{expert}`` and ``{ahead}`` in the name stand for numbers: ``{ahead}`` for the layers behind the last.
    The symbols are the section's shape as Megatron-Core has it, neither transposed nor stacked.
    """

    name: str
    symbols: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How ``parts`` are woven into the tensor ``canonical``, and how that tensor is cut over tensor-parallel ranks."""

    canonical: str
    """Megatron-Core's unfused name, with the numbers of layers and experts counted over the whole model."""
    parts: tuple[Part, ...]
    shard: Shard = "whole"
    strands: str = "1"
    """Number of strands each part is cut into, as a symbol."""
    interleaved: bool = False
    """Parts of the same name take turns row by row."""
    transposed: bool = False
    """The Hugging Face tensor is [in, out], and so is not what a Linear layer keeps."""
    stacked: bool = False
    """The Hugging Face tensor has one axis more, before the others: the layer's experts, or 1 for what is of none."""
    init: Init = "normal"
    """What a model that starts from nothing puts here; ``ones`` is a gain of one, whatever its norm adds to it."""
    dtype: Literal["float32"] | None = None
    """Kept in this type by Megatron-Core whatever the model's is."""
    when: str | None = None
    """The rule holds only where this is so, see :func:`is_so`."""
    unless: str | None = None
    """The rule holds only where this is not so."""
    layers: Layers = "all"
    """The rule holds only in layers of this kind."""
    alias: bool = False
    """The parts belong to another rule already: fill this tensor from them, but do not export it."""

    def holds(self, arch: Architecture) -> bool:
        """Whether a model of this architecture has the tensor."""
        if self.layers == "moe" and arch.moe is None:
            return False
        return (self.when is None or is_so(arch, self.when)) and (self.unless is None or not is_so(arch, self.unless))

    @property
    def of_expert(self) -> bool:
        """Whether the tensor belongs to one expert of many, and so is cut by expert tensor parallelism."""
        return "{expert}" in self.canonical

    def part_shapes(self, arch: Architecture) -> list[Shape]:
        """The shape of each part, in numbers."""
        sizes = dims(arch)
        return [tuple(product(symbol, sizes) for symbol in part.symbols) for part in self.parts]

    def canonical_shape(self, arch: Architecture) -> Shape:
        """Shape of the whole woven tensor, without vocabulary padding: the rows of the parts added up."""
        shapes = self.part_shapes(arch)
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def hf_shapes(self, arch: Architecture) -> dict[str, Shape]:
        """The Hugging Face tensors by name, numbers not filled in, with their shapes as they lie in the file."""
        found: dict[str, Shape] = {}
        for part, (rows, *tail) in zip(self.parts, self.part_shapes(arch), strict=True):
            found[part.name] = (found[part.name][0] + rows if part.name in found else rows, *tail)
        if self.transposed:
            found = {name: shape[::-1] for name, shape in found.items()}
        if self.stacked:
            found = {name: (dims(arch)["E"] if self.of_expert else 1, *shape) for name, shape in found.items()}
        return found

    def blocks(self, arch: Architecture) -> list[Block]:
        """Where every row of every part lies, in canonical order; together the blocks cover both sides exactly once."""
        strands = product(self.strands, dims(arch))
        rows = [shape[0] for shape in self.part_shapes(arch)]
        names = [part.name for part in self.parts]
        step = len(self.parts) if self.interleaved else 1
        blocks, at = [], 0
        for strand in range(strands):
            for part, total in enumerate(rows):
                length = total // strands
                before = sum(rows[other] for other in range(part) if names[other] == names[part])
                start = part if self.interleaved else before
                blocks.append(Block(part, start + strand * length * step, at, length, step))
                at += length
        return blocks


def dims(arch: Architecture) -> dict[str, int]:
    """The numbers behind the symbols.

    V vocabulary, H hidden, F feed-forward, P learned positions, N heads, G query groups, D head width, W the rows of
    queries, keys and values together; E experts, X width of one, S width of the shared ones. Of latent attention: Rq
    and Rk are the widths that queries and keys with values come from, Kd the latter with the rotated channels, Qh and
    Vh a head's queries and values, Kv a head's unrotated keys and values.
    """
    sizes = {
        "V": arch.vocab_size,
        "H": arch.hidden_size,
        "F": arch.ffn_hidden_size,
        "P": arch.max_position_embeddings,
        "N": arch.num_attention_heads,
        "G": arch.num_query_groups,
        "D": arch.kv_channels,
        "W": (arch.num_attention_heads + 2 * arch.num_query_groups) * arch.kv_channels,
        "1": 1,
        "2": 2,
    }
    if (moe := arch.moe) is not None:
        sizes |= {"E": moe.num_experts, "X": moe.ffn_hidden_size, "S": moe.shared_ffn_hidden_size}
    if (mla := arch.mla) is not None:
        sizes |= {
            "Rq": mla.q_lora_rank or 0,
            "Rk": mla.kv_lora_rank,
            "Kd": mla.kv_lora_rank + mla.qk_rope_head_dim,
            "Qh": mla.qk_nope_head_dim + mla.qk_rope_head_dim,
            "Vh": mla.v_head_dim,
            "Kv": mla.qk_nope_head_dim + mla.v_head_dim,
        }
    return sizes


def product(symbol: str, sizes: Mapping[str, int]) -> int:
    """``N*D`` -> the number of heads times their width."""
    return math.prod(sizes[factor] for factor in symbol.split("*"))


def field_of(arch: Architecture, path: str) -> Any:
    """``moe.top_k`` -> the field of a field; None where the outer one is None."""
    return reduce(lambda value, name: None if value is None else getattr(value, name), path.split("."), arch)


def is_so(arch: Architecture, condition: str) -> bool:
    """Whether a condition on fields of the Architecture holds, such as ``mlp_bias and form=post|sandwich``.

    A field alone must be true, one with words behind it must be one of these; ``moe.shared_gate`` looks inside.
    """

    def holds(term: str) -> bool:
        path, _, words = term.partition("=")
        value = field_of(arch, path)
        return value in words.split("|") if words else bool(value)

    return all(holds(term) for term in condition.split(" and "))


def copy(canonical: str, hf: str, *symbols: str, **how: Any) -> Rule:
    """The same tensor under another name; ``how`` are further fields of the rule."""
    return Rule(canonical=canonical, parts=(Part(hf, symbols),), **how)


def qkv(canonical: str, q: str, k: str, v: str, *tail: str, **how: Any) -> Rule:
    """Query, key and value projections (or their biases), woven by query group."""
    parts = (Part(q, ("N*D", *tail)), Part(k, ("G*D", *tail)), Part(v, ("G*D", *tail)))
    return Rule(canonical=canonical, parts=parts, shard="heads", strands="G", **how)


def gate_up(canonical: str, gate: str, up: str, *tail: str, width: str = "F", **how: Any) -> Rule:
    """The gate of a gated MLP above its up projection."""
    parts = (Part(gate, (width, *tail)), Part(up, (width, *tail)))
    return Rule(canonical=canonical, parts=parts, shard="gate_up", **how)


def under(rules: tuple[Rule, ...], renamed: Mapping[str, str]) -> tuple[Rule, ...]:
    """The same rules for a family that names its modules otherwise: pieces of Hugging Face names are replaced."""

    def name(old: str) -> str:
        return reduce(lambda text, pair: text.replace(*pair), renamed.items(), old)

    return tuple(
        replace(rule, parts=tuple(Part(name(part.name), part.symbols) for part in rule.parts)) for rule in rules
    )


def where(condition: str, *rules: Rule) -> tuple[Rule, ...]:
    """The same rules, which hold only where this is so besides."""
    return tuple(replace(rule, when=" and ".join(filter(None, (rule.when, condition)))) for rule in rules)
