"""Matches the tensors of an unsupported decoder to roles, by their shapes and then by their names.

All sizes of the probe model are different, so shapes nearly determine roles. The remaining assignments are returned,
the likeliest first; comparing logits selects one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from isthmus.errors import UsageError
from isthmus.families.blocks.layer import Form
from isthmus.families.rules.rule import Shape, symbol_size
from isthmus.tools.learn.matrix_matching import (
    ATTENTION,
    FEED_FORWARD,
    NUMBERED,
    ExpertTensors,
    MatrixRoles,
    assignments,
    match_experts,
    module_of,
    select_expert_tensors,
)

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

_NORM_NAMES = {
    1: ("",),
    2: (r"input|ln_?1|att|norm_?1", r"post_attention|ln_?2|mlp|feed|ff|norm_?2"),
    4: (r"input|ln_?1|^pre_(self_)?att", r"post_(self_)?att", r"pre_(mlp|feed|ff)|ln_?2", r"post_(mlp|feed|ff)"),
}
"""Usual names by number of norms, in the order of the layer."""


@dataclass(frozen=True, slots=True)
class NormPlacement:
    """The form of a layer, and the module of each of its norms."""

    form: Form
    modules: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DecoderStructure:
    """Layers are alike, except that some may have experts."""

    layers: str
    """Prefix of the layers' names: ``model.layers.``."""
    embedding: str
    head: str | None
    """None if the output layer is tied to the embedding."""
    positions: str | None
    final_norm: str
    norm_bias: bool
    biases: frozenset[str]
    """Modules of a layer."""
    matrices: tuple[MatrixRoles, ...]
    norms: tuple[NormPlacement, ...]
    qk_norms: tuple[tuple[str, str], ...]
    """Modules and symbols of the lengths of the QK norms: of queries, then of keys."""
    sinks: str | None
    experts: ExpertTensors | None
    dense_layers: tuple[int, ...]
    """Layers without experts, if others have experts."""


@dataclass(frozen=True, slots=True)
class _LayerTensors:
    """One layer without its experts, by module."""

    norms: Mapping[str, int]
    """Lengths, QK norms excluded."""
    qk_norms: Mapping[str, int]
    matrices: Mapping[str, Shape]
    biases: Mapping[str, Shape]
    sinks: str | None


def match_tensors(tensors: Mapping[str, Shape], sizes: Mapping[str, int]) -> DecoderStructure:
    """Infer the structure of a decoder from the shapes of its tensors and the sizes of the symbols V, H, F, P, N, G, D.

    Raises UsageError if a tensor has no role in any supported decoder.
    """
    prefix, layers, outer = _split(tensors)
    sizes = {**sizes, "W": (sizes["N"] + 2 * sizes["G"]) * sizes["D"], "2": 2, "1": 1}
    layer, experts, dense = _merge_layers(layers, sizes)
    classified = _classify(layer, prefix, sizes)
    embedding, head, positions, final_norm = _match_outer(outer, sizes)
    with_bias = {module in classified.biases for module in classified.norms} | {f"{final_norm}.bias" in outer}
    if len(with_bias) > 1:
        raise UsageError("some norms have a bias and others have none, which is not supported.")
    has_dense_block = experts is None or bool(dense)
    blocks = tuple(itertools.product(ATTENTION, FEED_FORWARD if has_dense_block else ((),)))
    matrices = assignments(classified.matrices, classified.biases, sizes, blocks)
    if not matrices:
        shapes = ", ".join(f"{module} {list(shape)}" for module, shape in classified.matrices.items())
        raise UsageError(f"the matrices of a layer are not those of attention and a feed-forward block: {shapes}.")
    return DecoderStructure(
        layers=prefix,
        embedding=embedding,
        head=head,
        positions=positions,
        final_norm=final_norm,
        norm_bias=with_bias == {True},
        biases=frozenset(module for module in classified.biases if module in classified.matrices),
        matrices=matrices,
        norms=tuple(_norm_placements(sorted(classified.norms))),
        qk_norms=_match_qk_norms(classified.qk_norms, sizes),
        sinks=classified.sinks,
        experts=experts,
        dense_layers=dense,
    )


def _merge_layers(
    layers: Mapping[int, Mapping[str, Shape]], sizes: Mapping[str, int]
) -> tuple[dict[str, Shape], ExpertTensors | None, tuple[int, ...]]:
    """The tensors that all layers have, those of the experts, and the layers without experts if others have some."""
    experts = {number: select_expert_tensors(layer, sizes) for number, layer in sorted(layers.items())}
    dense = [number for number in experts if not experts[number]]
    moe = [number for number in experts if experts[number]]
    for first, *others in filter(None, (dense, moe)):
        for number in others:
            if different := dict(layers[number].items() ^ layers[first].items()):
                raise UsageError(
                    f"layers {first} and {number} differ in their tensors ({min(different)}), which is not supported."
                )
    expert_names = experts[(dense or moe)[0]]
    layer = {name: shape for name, shape in layers[(dense or moe)[0]].items() if name not in expert_names}
    return (layer, match_experts(experts[moe[0]], sizes), tuple(dense)) if moe else (layer, None, ())


def _classify(layer: Mapping[str, Shape], prefix: str, sizes: Mapping[str, int]) -> _LayerTensors:
    vectors, matrices, biases = (
        {module_of(name): shape for name, shape in layer.items() if len(shape) == axes and name.endswith(end)}
        for axes, end in ((1, ".weight"), (2, ".weight"), (1, ".bias"))
    )
    sinks = [name for name, shape in layer.items() if name.endswith("sinks") and shape == (sizes["N"],)]
    known = {f"{module}.weight" for module in vectors | matrices} | set(sinks)
    known |= {f"{module}.bias" for module in biases if module in vectors or module in matrices}
    if unknown := sorted(layer.keys() - known):
        raise UsageError(f"{prefix}*.{unknown[0]} {list(layer[unknown[0]])} has no role in a supported decoder.")
    lengths = {module: shape[0] for module, shape in vectors.items()}
    qk_norms = {name: size for name, size in lengths.items() if _OF_QUERIES.search(name) or _OF_KEYS.search(name)}
    norms = {module: size for module, size in lengths.items() if module not in qk_norms}
    if wrong := sorted(module for module, size in norms.items() if size != sizes["H"]):
        raise UsageError(f"{prefix}*.{wrong[0]}.weight [{norms[wrong[0]]}] is not a norm over the hidden size.")
    if any(module in biases for module in qk_norms):
        raise UsageError(f"{sorted(qk_norms)[0]}: QK norms with a bias are not supported.")
    return _LayerTensors(norms, qk_norms, matrices, biases, sinks[0] if sinks else None)


def _split(tensors: Mapping[str, Shape]) -> tuple[str, dict[int, dict[str, Shape]], dict[str, Shape]]:
    layers: dict[int, dict[str, Shape]] = {}
    outer: dict[str, Shape] = {}
    prefixes: set[str] = set()
    for name, shape in tensors.items():
        match = NUMBERED.fullmatch(name)
        if match is None:
            outer[name] = shape
            continue
        prefixes.add(match[1])
        layers.setdefault(int(match[2]), {})[match[3]] = shape
    if len(prefixes) != 1:
        raise UsageError(f"expected one prefix of layers, found: {', '.join(sorted(prefixes)) or 'none'}.")
    return prefixes.pop(), layers, outer


def _match_outer(outer: Mapping[str, Shape], sizes: Mapping[str, int]) -> tuple[str, str | None, str | None, str]:
    wide = [name for name, shape in outer.items() if shape == (sizes["V"], sizes["H"])]
    heads = [name for name in wide if re.search(r"head|out", name)] if len(wide) > 1 else []
    embeddings = [name for name in wide if name not in heads]
    positions = [name for name, shape in outer.items() if shape == (sizes["P"], sizes["H"])]
    norms = [module_of(name) for name, shape in outer.items() if shape == (sizes["H"],) and name.endswith(".weight")]
    known = {*wide, *positions} | {f"{norm}.{end}" for norm in norms for end in ("weight", "bias")}
    if unknown := sorted(outer.keys() - known):
        raise UsageError(f"{unknown[0]} {list(outer[unknown[0]])} has no role in a supported decoder.")
    for role, modules in (("embedding", embeddings), ("final norm", norms)):
        if len(modules) != 1:
            raise UsageError(f"expected one {role} with weights, found {', '.join(modules) or 'none'}.")
    if len(heads) > 1 or len(positions) > 1:
        raise UsageError(f"more than one output layer or position embedding: {', '.join([*heads, *positions])}.")
    return embeddings[0], next(iter(heads), None), next(iter(positions), None), norms[0]


def _match_qk_norms(norms: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
    if not norms:
        return ()
    queries, keys = ([module for module in norms if pattern.search(module)] for pattern in (_OF_QUERIES, _OF_KEYS))
    if len(queries) == len(keys) == 1 and len(norms) == 2:
        for symbols in (("D", "D"), ("N*D", "G*D")):
            if [norms[queries[0]], norms[keys[0]]] == [symbol_size(symbol, sizes) for symbol in symbols]:
                return (queries[0], symbols[0]), (keys[0], symbols[1])
    shapes = ", ".join(f"{module} [{size}]" for module, size in norms.items())
    raise UsageError(f"these QK norms are not supported: {shapes}.")


def _norm_placements(modules: Sequence[str]) -> Iterator[NormPlacement]:
    """The likeliest by their names first."""
    if len(modules) not in _FORMS:
        text = f"{len(modules)} norms ({', '.join(modules)})" if modules else "no norms with weights"
        raise UsageError(f"a layer has {text}; layers with 1, 2 or 4 norms are supported.")

    def mismatches(order: Sequence[str]) -> int:
        return sum(not re.search(hint, name) for hint, name in zip(_NORM_NAMES[len(order)], order, strict=True))

    for order in sorted(itertools.permutations(modules), key=mismatches):
        for form, roles in _FORMS[len(modules)]:
            yield NormPlacement(form, dict(zip(roles, order, strict=True)))
