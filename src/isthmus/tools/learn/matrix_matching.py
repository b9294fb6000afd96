"""Assigns matrices to roles by their shapes, the likeliest names first: of a layer, and of a mixture of experts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from isthmus.errors import UsageError
from isthmus.families.rules.rule import Shape, symbol_size

NUMBERED = re.compile(r"(.+?\.)(\d+)\.(.+)")
"""The name of a layer's or expert's tensor: prefix, number, rest."""
Role = Literal["q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "fc1", "fc2"]
_SHAPES: Mapping[Role, tuple[str, str]] = {
    "q": ("N*D", "H"),
    "k": ("G*D", "H"),
    "v": ("G*D", "H"),
    "qkv": ("W", "H"),
    "o": ("H", "N*D"),
    "gate": ("F", "H"),
    "up": ("F", "H"),
    "gate_up": ("2*F", "H"),
    "fc1": ("F", "H"),
    "fc2": ("H", "F"),
}
ATTENTION: tuple[tuple[Role, ...], ...] = (("q", "k", "v", "o"), ("qkv", "o"))
FEED_FORWARD: tuple[tuple[Role, ...], ...] = (("gate", "up", "fc2"), ("gate_up", "fc2"), ("fc1", "fc2"))
GATED = tuple((roles,) for roles in FEED_FORWARD[:2])
_NAMES: Mapping[Role, str] = {
    "q": r"\bq_|\bq\b|query|\bwq\b",
    "k": r"\bk_|\bk\b|key\b|\bwk\b",
    "v": r"\bv_|\bv\b|value\b|\bwv\b",
    "qkv": r"qkv|query_key_value|c_attn",
    "o": r"\bo_|\bout|\bo\b|\bwo\b|dense\b|c_proj",
    "gate": r"gate|\bw1\b",
    "up": r"up_|\bup\b|\bw3\b",
    "gate_up": r"gate",
    "fc1": r"fc1|c_fc|fc_in|_to_4h|up_",
    "fc2": r"fc2|c_proj|fc_out|4h_to|down|\bw2\b",
}


@dataclass(frozen=True, slots=True)
class MatrixRoles:
    """A possible assignment: the module of each role, and whether weights are [in, out]."""

    modules: Mapping[Role, str]
    transposed: bool


def assignments(
    matrices: Mapping[str, Shape],
    biases: Mapping[str, Shape],
    sizes: Mapping[str, int],
    role_sets: Sequence[tuple[tuple[Role, ...], ...]],
) -> tuple[MatrixRoles, ...]:
    """All assignments that fit the shapes of the matrices and their biases, the likeliest names first."""
    ranked: list[tuple[int, MatrixRoles]] = []
    for transposed, role_set in itertools.product((False, True), role_sets):
        roles = tuple(itertools.chain(*role_set))
        if len(roles) != len(matrices):
            continue
        fits = []
        for role in roles:
            shape = tuple(symbol_size(symbol, sizes) for symbol in _SHAPES[role])
            stored = shape[::-1] if transposed else shape
            candidates = [module for module, size in matrices.items() if size == stored]
            fits.append([module for module in candidates if biases.get(module) in (None, shape[:1])])
        for modules in itertools.product(*fits):
            if len(set(modules)) == len(modules):
                last_names = [module.removesuffix(".weight").rpartition(".")[2] for module in modules]
                hints = zip(roles, last_names, strict=True)
                mismatches = sum(not re.search(_NAMES[role], name) for role, name in hints)
                ranked.append((mismatches, MatrixRoles(dict(zip(roles, modules, strict=True)), transposed)))
    return tuple(matrices for _, matrices in sorted(ranked, key=lambda pair: pair[0]))


def module_of(name: str) -> str:
    """``mlp.up_proj.weight`` -> ``mlp.up_proj``."""
    return name.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """Names are relative to the layer."""

    router: str
    """Weight [E, H]."""
    router_bias: str | None
    expert_bias: tuple[str, bool] | None
    """Its name, and whether it has an extra first axis of length 1."""
    matrices: tuple[MatrixRoles, ...]
    """Possible assignments; names contain ``{expert}`` unless the experts are stacked."""
    stacked: bool
    shared: tuple[MatrixRoles, ...]
    """Possible assignments; empty if there are no shared experts."""
    shared_gate: str | None


def select_expert_tensors(layer: Mapping[str, Shape], sizes: Mapping[str, int]) -> dict[str, Shape]:
    if "E" not in sizes:
        return {}
    number = sizes["E"]
    tensors = {
        name: shape
        for name, shape in layer.items()
        if (len(shape) == 3 and shape[0] == number) or (NUMBERED.fullmatch(name) and "norm" not in name)
    }
    if not tensors:
        return {}
    router = ((number, sizes["H"]), (number,), (1, number), (1, sizes["H"]))
    wide = sizes.get("S", 0)
    shared_shapes = ((wide, sizes["H"]), (sizes["H"], wide), (2 * wide, sizes["H"]))
    return tensors | {
        name: shape for name, shape in layer.items() if shape in router or (wide and shape in shared_shapes)
    }


def match_experts(tensors: Mapping[str, Shape], sizes: Mapping[str, int]) -> ExpertTensors:
    """Match the tensors that :func:`select_expert_tensors` returns."""
    number, hidden = sizes["E"], sizes["H"]
    stacked = {name: shape[1:] for name, shape in tensors.items() if len(shape) == 3}
    single = {}
    for name, shape in tensors.items():
        if (match := NUMBERED.fullmatch(name)) is not None and len(shape) < 3:
            single[f"{match[1]}{{expert}}.{match[3]}"] = shape
    if bool(stacked) == bool(single):
        raise UsageError("some tensors have one expert and others all experts, which is not supported.")
    routers = [name for name, shape in tensors.items() if shape == (number, hidden)]
    vectors = [name for name, shape in tensors.items() if shape in ((number,), (1, number))]
    corrections = [name for name in vectors if "correction" in name or "expert_bias" in name]
    biases = [name for name in vectors if name not in corrections]
    gates = [name for name, shape in tensors.items() if shape == (1, hidden)]
    if len(routers) != 1 or max(map(len, (corrections, biases, gates))) > 1:
        names = ", ".join([*routers, *vectors, *gates])
        raise UsageError(f"this router is not supported: {names or 'it has no weight'}.")
    known = {*routers, *vectors, *gates, *stacked} | {name for name in tensors if NUMBERED.fullmatch(name)}
    wide = {module_of(name): tensors[name] for name in tensors if name not in known and name.endswith(".weight")}
    shared = assignments(wide, {}, {**sizes, "F": sizes.get("S", 0)}, GATED)
    if wide and not shared:
        raise UsageError(f"these shared experts are not supported: {', '.join(wide)}.")
    expert_shapes = stacked or single
    matrices = assignments(expert_shapes, {}, {**sizes, "F": sizes["X"]}, GATED)
    if not matrices:
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in expert_shapes.items())
        raise UsageError(f"these experts are not supported: {shapes}")
    return ExpertTensors(
        router=routers[0],
        router_bias=next(iter(biases), None),
        expert_bias=(corrections[0], len(tensors[corrections[0]]) == 2) if corrections else None,
        matrices=matrices,
        stacked=bool(stacked),
        shared=shared,
        shared_gate=next(iter(gates), None),
    )
