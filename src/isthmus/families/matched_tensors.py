"""Settings that apply to tensors by patterns of their Hugging Face names."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Mapping
from typing import TypeVar

from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family, Placement
from isthmus.families.rules.mtp import is_mtp_copy

Value = TypeVar("Value")


def trained_tensors(family: Family, arch: Architecture) -> dict[str, Placement]:
    """The tensors that gradients train, by canonical name: no buffers, indexers, or copies of the own embedding."""
    return {
        name: placement
        for name, placement in family.placements(arch).items()
        if placement.rule.trained and not (name.endswith("expert_bias") or is_mtp_copy(name))
    }


def hidden_matrices(family: Family, arch: Architecture) -> dict[str, Placement]:
    """The weight matrices of the layers, by canonical name: no embeddings, output layer, routers, or single rows."""

    def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
        outside = name.startswith(("embedding.", "output_layer.")) or ".router." in name or name.endswith(".A_log")
        return not outside and len(shape) == 2 and min(shape) > 1

    return {
        name: placement
        for name, placement in trained_tensors(family, arch).items()
        if is_matrix(name, placement.rule.canonical_shape(arch))
    }


def values_by_pattern(
    family: Family, arch: Architecture, values: Mapping[str, Value], setting: str, frozen: Collection[str] = ()
) -> dict[str, Value]:
    """The value of the first ``fnmatch`` pattern that matches a trained tensor, by canonical name.

    ``frozen`` are canonical names of tensors that are not trained.

    Raises:
        UsageError: a pattern matches no tensor, or tensors that are one tensor in training have different values.
    """
    if not values:
        return {}
    patterns = {pattern: re.compile(fnmatch.translate(pattern)) for pattern in values}
    unused, matched, names = dict.fromkeys(values), dict[str, Value](), dict[str, None]()
    for canonical, placement in trained_tensors(family, arch).items():
        if canonical in frozen:
            continue
        part_patterns: dict[str, str | None] = {}
        for name in placement.hf:
            matching = [pattern for pattern, compiled in patterns.items() if compiled.match(name)]
            for pattern in matching:
                unused.pop(pattern, None)
            part_patterns[name] = matching[0] if matching else None
        names |= dict.fromkeys(placement.hf)
        chosen = {None if pattern is None else values[pattern] for pattern in part_patterns.values()}
        if len(chosen) > 1:
            raise UsageError(
                f"{setting} treats {', '.join(part_patterns)} differently, and they are one tensor in training. "
                "Use a pattern that matches all of them, or none."
            )
        if (value := chosen.pop()) is not None:
            matched[canonical] = value
    if unused:
        pattern = next(iter(unused))
        raise UsageError(f"{setting}: {pattern} matches no trained tensor of this model. {_near(pattern, names)}")
    return matched


def frozen_tensors(family: Family, arch: Architecture, patterns: tuple[str, ...]) -> frozenset[str]:
    """Canonical names of the tensors that ``train.freeze`` keeps as they are; UsageError as for other patterns."""
    frozen = frozenset(values_by_pattern(family, arch, dict.fromkeys(patterns, True), "train.freeze"))
    if frozen >= trained_tensors(family, arch).keys():
        raise UsageError("train.freeze matches all tensors of this model, so nothing is trained. Name fewer.")
    return frozen


def untrained_tensors(family: Family, arch: Architecture) -> frozenset[str]:
    """Canonical names of the weights that no gradient reaches."""
    return frozenset(name for name, placement in family.placements(arch).items() if not placement.rule.trained)


def _near(pattern: str, names: Mapping[str, None]) -> str:
    if not names:
        return "All of them are frozen: leave it out."
    # Layers and experts by one name: a model has tens of thousands of tensors.
    kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
    near = difflib.get_close_matches(pattern, kinds, n=3, cutoff=0.4) or kinds[:3]
    return f"Similar names: {', '.join(near)}."
