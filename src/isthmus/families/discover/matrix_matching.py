"""Assigns the matrices of a layer to roles by their shapes, the likeliest names first."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from isthmus.families.rules.rule import Shape, symbol_size

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
GATED = FEED_FORWARD[:2]
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
) -> Iterator[MatrixRoles]:
    """All assignments that fit the shapes of the matrices and their biases, the likeliest names first."""
    found: list[tuple[int, MatrixRoles]] = []
    for transposed, role_set in itertools.product((False, True), role_sets):
        roles = tuple(itertools.chain(*role_set))
        if len(roles) != len(matrices):
            continue
        fits = [
            [module for module, shape in matrices.items() if _fits(role, shape, biases.get(module), sizes, transposed)]
            for role in roles
        ]
        for modules in itertools.product(*fits):
            if len(set(modules)) == len(modules):
                given = dict(zip(roles, modules, strict=True))
                mismatches = sum(not re.search(_NAMES[role], _last(module)) for role, module in given.items())
                found.append((mismatches, MatrixRoles(given, transposed)))
    yield from (matrices for _, matrices in sorted(found, key=lambda pair: pair[0]))


def _fits(role: Role, shape: Shape, bias: Shape | None, sizes: Mapping[str, int], transposed: bool) -> bool:
    wanted = tuple(symbol_size(symbol, sizes) for symbol in _SHAPES[role])
    return shape == (wanted[::-1] if transposed else wanted) and bias in (None, wanted[:1])


def _last(module: str) -> str:
    return module.removesuffix(".weight").rpartition(".")[2]


def module_of(name: str) -> str:
    """``mlp.up_proj.weight`` -> ``mlp.up_proj``."""
    return name.rpartition(".")[0]


def ends_in(name: str, end: str) -> bool:
    return name.rpartition(".")[2] == end
