"""Which tensor of an unknown decoder is what: by its shape first, by its name where shapes leave a choice.

The model is a small copy whose sizes are all different, so that a shape is nearly a role. What stays open is said as
several assignments, the likeliest first; which of them is right is for a proof to say.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from isthmus.errors import UsageError
from isthmus.families.architecture import Form
from isthmus.families.discover.expert_matching import Experts, read_experts, tensors_of_experts
from isthmus.families.discover.matrix_matching import ATTENTION, FEED_FORWARD, Matrices, assignments, ends_in, module_of
from isthmus.families.rules.rule import Shape, product

_LAYER_NUMBER = re.compile(r"(.+?\.)(\d+)\.(.+)")
_OF_QUERIES, _OF_KEYS = re.compile(r"(?:^|[._])q(?:uery)?(?:[._]|$)"), re.compile(r"(?:^|[._])k(?:ey)?(?:[._]|$)")
NORM_ROLES = ("input_layernorm", "post_self_attn_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
_FORMS: Mapping[int, tuple[tuple[Form, tuple[str, ...]], ...]] = {
    1: (("parallel", NORM_ROLES[:1]),),
    2: (
        ("pre", (NORM_ROLES[0], NORM_ROLES[2])),
        ("post", (NORM_ROLES[1], NORM_ROLES[3])),
        ("parallel_two_norms", (NORM_ROLES[0], NORM_ROLES[2])),
    ),
    4: (("sandwich", NORM_ROLES),),
}

_TWO_NORMS = (r"input|ln_?1|att|norm_?1", r"post_attention|ln_?2|mlp|feed|ff|norm_?2")
_FOUR_NORMS = (
    r"input|ln_?1|^pre_(self_)?att",
    r"post_(self_)?att",
    r"pre_(mlp|feed|ff)|ln_?2",
    r"post_(mlp|feed|ff)",
)


@dataclass(frozen=True, slots=True)
class Norms:
    """One way to see the norms of a layer: where they stand, and the module of each place."""

    form: Form
    modules: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Structure:
    """The tensors of a decoder whose layers are alike, but for some of them having experts."""

    layers: str
    """What the names of layers begin with, up to the number: ``model.layers.``."""
    embedding: str
    head: str | None
    """None where the output layer is the embedding."""
    positions: str | None
    final_norm: str
    norm_bias: bool
    biases: frozenset[str]
    """The modules of a layer that have one."""
    matrices: tuple[Matrices, ...]
    norms: tuple[Norms, ...]
    qk_norm: tuple[str, str] | None
    """Modules that normalise queries and keys."""
    qk_norm_symbols: tuple[str, str]
    sinks: str | None
    experts: Experts | None
    dense_layers: tuple[int, ...]
    """Those without experts, where others have some."""


def recognise(tensors: Mapping[str, Shape], sizes: Mapping[str, int]) -> Structure:
    """Read the structure off names and shapes.

    Args:
        tensors: all of a model.
        sizes: numbers of its symbols, see :func:`isthmus.families.rules.rule.dims`: V, H, F, P, N, G, D.

    Raises:
        UsageError: a tensor has no role in any decoder that is built.
    """
    prefix, layers, outer = _split(tensors)
    sizes = {**sizes, "W": (sizes["N"] + 2 * sizes["G"]) * sizes["D"], "2": 2, "1": 1}
    of_experts = {number: tensors_of_experts(layer, sizes) for number, layer in layers.items()}
    plain_layers = {number: _without(layer, of_experts[number]) for number, layer in layers.items()}
    dense = tuple(number for number in sorted(layers) if not of_experts[number])
    with_experts = [number for number in sorted(layers) if of_experts[number]]
    _check_alike(of_experts, with_experts)
    _check_alike(plain_layers, list(dense))
    _check_alike(plain_layers, with_experts)
    experts = read_experts(of_experts[with_experts[0]], sizes) if with_experts else None
    layer = plain_layers[dense[0] if dense else with_experts[0]]
    vectors = {
        module_of(name): shape[0] for name, shape in layer.items() if len(shape) == 1 and ends_in(name, "weight")
    }
    matrices = {module_of(name): shape for name, shape in layer.items() if len(shape) == 2 and ends_in(name, "weight")}
    biases = {module_of(name): shape for name, shape in layer.items() if len(shape) == 1 and ends_in(name, "bias")}
    sinks = [name for name, shape in layer.items() if name.endswith("sinks") and shape == (sizes["N"],)]
    placed = {f"{module}.weight" for module in vectors | matrices}
    placed |= {f"{module}.bias" for module in biases if module in vectors or module in matrices} | set(sinks)
    if strange := sorted(layer.keys() - placed):
        raise UsageError(f"{prefix}*.{strange[0]} {list(layer[strange[0]])} has no place in a decoder that is built.")
    heads = {module: size for module, size in vectors.items() if _OF_QUERIES.search(module) or _OF_KEYS.search(module)}
    qk_norm, symbols = _qk_norm(heads, sizes)
    plain = {module: size for module, size in vectors.items() if module not in heads}
    if wrong := sorted(module for module, size in plain.items() if size != sizes["H"]):
        raise UsageError(f"{prefix}*.{wrong[0]}.weight [{plain[wrong[0]]}] is a norm over something that is not built.")
    embedding, head, positions, final = _outer(outer, sizes)
    with_bias = {module in biases for module in plain} | {f"{final}.bias" in outer}
    if len(with_bias) > 1:
        raise UsageError("some norms have a bias and some have none, which is not built.")
    if any(module in biases for module in heads):
        raise UsageError(f"{sorted(heads)[0]}: norms of queries and keys with a bias are not built.")
    blocks = FEED_FORWARD if dense else ((),)
    ways = tuple(assignments(matrices, biases, sizes, tuple(itertools.product(ATTENTION, blocks))))
    if not ways:
        told = ", ".join(f"{module} {list(shape)}" for module, shape in matrices.items())
        raise UsageError(f"the matrices of a layer are not those of attention and a feed-forward block: {told}.")
    return Structure(
        layers=prefix,
        embedding=embedding,
        head=head,
        positions=positions,
        final_norm=final,
        norm_bias=with_bias == {True},
        biases=frozenset(module for module in biases if module in matrices),
        matrices=ways,
        norms=tuple(_norms(sorted(plain))),
        qk_norm=qk_norm,
        qk_norm_symbols=symbols,
        sinks=sinks[0] if sinks else None,
        experts=experts,
        dense_layers=dense if experts is not None else (),
    )


def _split(tensors: Mapping[str, Shape]) -> tuple[str, dict[int, dict[str, Shape]], dict[str, Shape]]:
    """What layers are called, the tensors of each, and those outside."""
    layers: dict[int, dict[str, Shape]] = {}
    outer: dict[str, Shape] = {}
    prefixes: set[str] = set()
    for name, shape in tensors.items():
        found = _LAYER_NUMBER.fullmatch(name)
        if found is None:
            outer[name] = shape
            continue
        prefixes.add(found[1])
        layers.setdefault(int(found[2]), {})[found[3]] = shape
    if len(prefixes) != 1:
        raise UsageError(f"layers go by {len(prefixes)} names ({', '.join(sorted(prefixes))}), one was wanted.")
    return prefixes.pop(), layers, outer


def _check_alike(layers: Mapping[int, Mapping[str, Shape]], numbers: Sequence[int]) -> None:
    for number in numbers:
        if layers[number] != layers[numbers[0]]:
            other = sorted(dict(layers[number].items() ^ layers[numbers[0]].items()))[0]
            raise UsageError(f"layer {number} has other tensors than layer {numbers[0]} ({other}), which is not built.")


def _without(layer: Mapping[str, Shape], left_out: Mapping[str, Shape]) -> dict[str, Shape]:
    return {name: shape for name, shape in layer.items() if name not in left_out}


def _outer(outer: Mapping[str, Shape], sizes: Mapping[str, int]) -> tuple[str, str | None, str | None, str]:
    """Embedding, output layer, learned positions, last norm."""
    wide = [name for name, shape in outer.items() if shape == (sizes["V"], sizes["H"])]
    heads = [name for name in wide if re.search(r"head|out", name)] if len(wide) > 1 else []
    embeddings = [name for name in wide if name not in heads]
    positions = [name for name, shape in outer.items() if shape == (sizes["P"], sizes["H"])]
    norms = [module_of(name) for name, shape in outer.items() if shape == (sizes["H"],) and ends_in(name, "weight")]
    known = {*wide, *positions} | {f"{norm}.{end}" for norm in norms for end in ("weight", "bias")}
    if strange := sorted(outer.keys() - known):
        raise UsageError(f"{strange[0]} {list(outer[strange[0]])} has no place in a decoder that is built.")
    for what, found, most in (("embedding", embeddings, 1), ("last norm", norms, 1)):
        if len(found) != most:
            raise UsageError(f"one {what} with weights was wanted, found {', '.join(found) or 'none'}.")
    if len(heads) > 1 or len(positions) > 1:
        raise UsageError(f"more than one output layer or table of positions: {', '.join([*heads, *positions])}.")
    return embeddings[0], next(iter(heads), None), next(iter(positions), None), norms[0]


def _qk_norm(heads: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[tuple[str, str] | None, tuple[str, str]]:
    """The norms of queries and keys, and their sizes as symbols."""
    if not heads:
        return None, ("D", "D")
    queries = [module for module in heads if _OF_QUERIES.search(module)]
    keys = [module for module in heads if _OF_KEYS.search(module)]
    if len(queries) == len(keys) == 1 and len(heads) == 2:
        found = (heads[queries[0]], heads[keys[0]])
        for symbols in (("D", "D"), ("N*D", "G*D")):
            if found == tuple(product(symbol, sizes) for symbol in symbols):
                return (queries[0], keys[0]), symbols
    told = ", ".join(f"{module} [{size}]" for module, size in heads.items())
    raise UsageError(f"norms of queries and keys of this kind are not built: {told}.")


def _norms(modules: Sequence[str]) -> Iterator[Norms]:
    """All ways in which a layer's norms can stand, in the order of their names first."""
    if len(modules) not in _FORMS:
        told = f"{len(modules)} ({', '.join(modules)})" if modules else "none with weights"
        raise UsageError(f"norms in a layer: {told}; layers with 1, 2 or 4 are built.")
    orders = sorted(itertools.permutations(modules), key=_unlikely)
    for order in orders:
        for form, places in _FORMS[len(modules)]:
            yield Norms(form, dict(zip(places, order, strict=True)))


def _unlikely(order: Sequence[str]) -> int:
    """How badly names fit the places they would stand at."""
    hints = _FOUR_NORMS if len(order) == len(NORM_ROLES) else _TWO_NORMS
    return sum(not re.search(hint, name) for hint, name in zip(hints, order, strict=False))
