"""The tensors of an unknown decoder's mixtures of experts: router, experts, and what all tokens share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from isthmus.errors import UsageError
from isthmus.families.discover.matrix_matching import GATED, Matrices, assignments, ends_in, module_of
from isthmus.families.rules.rule import Shape

_EXPERT = re.compile(r"(.+?\.)(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Experts:
    """The tensors of a layer that is a mixture of experts."""

    router: str
    """Names, from the layer's on, of the weight [E, H], and of what else the router has."""
    router_bias: str | None
    expert_bias: tuple[str, bool] | None
    """With whether it has an axis of length 1 before the others."""
    matrices: tuple[Matrices, ...]
    """Ways to see those of one expert: names of tensors, with ``{expert}`` unless they are stacked."""
    stacked: bool
    shared: tuple[Matrices, ...]
    """Ways to see those of the shared experts: modules; empty if there are none."""
    shared_gate: str | None


def tensors_of_experts(layer: Mapping[str, Shape], sizes: Mapping[str, int]) -> dict[str, Shape]:
    """The tensors of a layer that only a mixture of experts has."""
    if "E" not in sizes:
        return {}
    number = sizes["E"]
    found = {
        name: shape
        for name, shape in layer.items()
        if (len(shape) == 3 and shape[0] == number) or (_EXPERT.fullmatch(name) and "norm" not in name)
    }
    if not found:
        return {}
    around = ((number, sizes["H"]), (number,), (1, number), (1, sizes["H"]))
    wide = sizes.get("S", 0)
    of_shared = ((wide, sizes["H"]), (sizes["H"], wide), (2 * wide, sizes["H"]))
    return found | {name: shape for name, shape in layer.items() if shape in around or (wide and shape in of_shared)}


def read_experts(tensors: Mapping[str, Shape], sizes: Mapping[str, int]) -> Experts:
    """What each of these tensors is in a mixture of experts."""
    number, hidden = sizes["E"], sizes["H"]
    one = {**sizes, "F": sizes["X"]}
    stacked = {name: shape[1:] for name, shape in tensors.items() if len(shape) == 3}
    single = {}
    for name, shape in tensors.items():
        if (found := _EXPERT.fullmatch(name)) is not None and len(shape) < 3:
            single[f"{found[1]}{{expert}}.{found[3]}"] = shape
    if bool(stacked) == bool(single):
        raise UsageError("experts lie one by one in some tensors and together in others, which is not built.")
    routers = [name for name, shape in tensors.items() if shape == (number, hidden)]
    vectors = [name for name, shape in tensors.items() if shape in ((number,), (1, number))]
    corrections = [name for name in vectors if "correction" in name or "expert_bias" in name]
    biases = [name for name in vectors if name not in corrections]
    gates = [name for name, shape in tensors.items() if shape == (1, hidden)]
    if len(routers) != 1 or max(map(len, (corrections, biases, gates))) > 1:
        told = ", ".join([*routers, *vectors, *gates])
        raise UsageError(f"routers of this kind are not built: {told or 'no weight'}.")
    known = {*routers, *vectors, *gates, *stacked} | {name for name in tensors if _EXPERT.fullmatch(name)}
    wide = {module_of(name): shape for name, shape in tensors.items() if name not in known and ends_in(name, "weight")}
    shared = tuple(assignments(wide, {}, {**sizes, "F": sizes.get("S", 0)}, tuple((way,) for way in GATED)))
    if wide and not shared:
        raise UsageError(f"shared experts of this kind are not built: {', '.join(wide)}.")
    each = stacked or single
    ways = tuple(assignments(each, {}, one, tuple((way,) for way in GATED)))
    if not ways:
        raise UsageError("experts of this kind are not built: " + ", ".join(f"{k} {list(v)}" for k, v in each.items()))
    return Experts(
        router=routers[0],
        router_bias=next(iter(biases), None),
        expert_bias=(corrections[0], len(tensors[corrections[0]]) == 2) if corrections else None,
        matrices=ways,
        stacked=bool(stacked),
        shared=shared,
        shared_gate=next(iter(gates), None),
    )
