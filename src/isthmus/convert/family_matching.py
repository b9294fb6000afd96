"""Finds the family whose config can express an architecture, for checkpoints without a config."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from isthmus.convert.coverage import first_few
from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.blocks.rotary import QueryScaling, RopeScaling
from isthmus.families.family import Family
from isthmus.families.registry import all_families

PREFERRED = (
    *("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "qwen2_moe"),
    *("deepseek_v2", "deepseek_v3", "gpt2", "gpt_neox"),
)
"""Priority if several families match; the others follow in alphabetical order."""
LAST_RESORT = "isthmus"
"""Expresses nearly any model, with its own modeling files."""


def match_family(arch: Architecture, first: str | None = None) -> tuple[Family, Architecture, list[str]]:
    """The family that expresses this architecture exactly, the architecture in it, and other families that do.

    ``first`` has the highest priority. A UsageError names the nearest family and its differences.
    """
    families = all_families()
    order = [name for name in dict.fromkeys((first, *PREFERRED)) if name in families]
    order += [name for name in families if name not in (*order, LAST_RESORT)] + [LAST_RESORT]
    matching: list[tuple[Family, Architecture]] = []
    nearest: tuple[str, list[tuple[str, Any, Any]]] | None = None
    for name in order:
        if families[name].nested is not None:  # a checkpoint without config has no towers
            continue
        if (expressed := _expressed_by(families[name], arch)) is None:
            continue
        if not (differences := differing_fields(_normalized(arch), _normalized(expressed))):
            matching.append((families[name], replace(expressed, init_std=arch.init_std)))
        elif nearest is None or len(differences) < len(nearest[1]):
            nearest = (name, differences)
    if not matching:
        close = ""
        if nearest is not None:
            listed = first_few([f"{name}={ours} and not {theirs}" for name, ours, theirs in nearest[1]])
            close = f" The nearest is {nearest[0]}, except for {listed}."
        raise UsageError(f"no family can express the model that Megatron-LM's args describe.{close}")
    (family, expressed), *others = matching
    return family, expressed, [other.name for other, _ in others]


def _expressed_by(family: Family, arch: Architecture) -> Architecture | None:
    """The architecture after a round trip through the config of the family; None if it has no such config."""
    paths = (*family.keys, *family.traits, *family.derived)
    if any(arch.setting(path.partition(".")[0]) is None for path in paths if "." in path):
        return None  # the family always has experts or latent attention
    try:
        return family.to_architecture(family.to_hf_config(arch))
    except (DataError, UsageError):
        return None


def differing_fields(first: Architecture, second: Architecture) -> list[tuple[str, Any, Any]]:
    """(path, value in ours, value in theirs) of fields that differ, except for family and ``init_std``."""
    first_fields, second_fields = _flat(first), _flat(second)
    names = sorted(first_fields.keys() | second_fields.keys())
    return [
        (name, first_fields.get(name), second_fields.get(name))
        for name in names
        if first_fields.get(name) != second_fields.get(name)
    ]


def _flat(arch: Architecture) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in arch.settings.items():
        if isinstance(value, RopeScaling | QueryScaling):
            values |= {f"{name}.{inner}": number for inner, number in asdict(value).items() if number is not None}
        elif name not in ("family", "init_std") and value is not None:
            values[name] = value
    return values


def _normalized(arch: Architecture) -> Architecture:
    """One value for fields where different values compute the same."""
    if (moe := arch.moe) is None:
        return arch
    if moe.score == "softmax_of_chosen" and moe.num_groups == 1 and not moe.expert_bias:
        moe = replace(moe, score="softmax", normalize=True)
    if moe.score == "softmax" or not moe.normalize:
        moe = replace(moe, normalize_min=0.0)  # the sum of top-k softmax scores is never that small
    if moe.num_groups == 1:
        moe = replace(moe, group_top_k=1, group_score="max")
    # Without dense layers, no layer uses ffn_hidden_size.
    width = arch.mlp.ffn_hidden_size if moe.dense_layers else 0
    return replace(arch, moe=moe, mlp=replace(arch.mlp, ffn_hidden_size=width))
