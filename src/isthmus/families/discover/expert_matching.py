"""Matching the tensors of a mixture of experts: router, experts and shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from isthmus.errors import UsageError
from isthmus.families.discover.matrix_matching import GATED, NUMBERED, MatrixRoles, assignments, module_of
from isthmus.families.rules.rule import Shape


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
    found = {
        name: shape
        for name, shape in layer.items()
        if (len(shape) == 3 and shape[0] == number) or (NUMBERED.fullmatch(name) and "norm" not in name)
    }
    if not found:
        return {}
    router = ((number, sizes["H"]), (number,), (1, number), (1, sizes["H"]))
    wide = sizes.get("S", 0)
    of_shared = ((wide, sizes["H"]), (sizes["H"], wide), (2 * wide, sizes["H"]))
    return found | {name: shape for name, shape in layer.items() if shape in router or (wide and shape in of_shared)}


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
    each = stacked or single
    found = assignments(each, {}, {**sizes, "F": sizes["X"]}, GATED)
    if not found:
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in each.items())
        raise UsageError(f"these experts are not supported: {shapes}")
    return ExpertTensors(
        router=routers[0],
        router_bias=next(iter(biases), None),
        expert_bias=(corrections[0], len(tensors[corrections[0]]) == 2) if corrections else None,
        matrices=found,
        stacked=bool(stacked),
        shared=shared,
        shared_gate=next(iter(gates), None),
    )
