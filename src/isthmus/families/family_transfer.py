"""Expressing a model of one family as a model of another, if that family supports it."""

from __future__ import annotations

from dataclasses import replace

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import SETTINGS, Architecture
from isthmus.families.family import Family


def transfer_architecture(arch: Architecture, source: Family, target: Family) -> Architecture:
    """Express the model in the config and tensors of ``target``; UsageError if that is impossible.

    The supported fields of a family are found by a round trip through its config: a field without a key changes.
    """
    if source.name == target.name:
        return arch
    target_arch = replace(arch, family=target.name)
    why = _config_mismatch(target_arch, target) or _tensor_mismatch(target_arch, source, target)
    if why is not None:
        raise UsageError(f"this {source.name} model cannot be exported as {target.name}: {why}.")
    return target_arch


def _config_mismatch(arch: Architecture, target: Family) -> str | None:
    if arch.head.score_head and target.auto_map:
        return "its modelling files have no class of reward models"
    try:
        read_back = target.to_architecture(target.to_hf_config(arch))
    except (DataError, UsageError) as error:
        return str(error).removesuffix(".")
    names = dict.fromkeys(_named(name, arch, read_back) for name in SETTINGS)
    lost = [
        f"{name}={arch.setting(name)} (it would become {read_back.setting(name)})"
        for name in names
        if arch.setting(name) != read_back.setting(name)
    ]
    return f"its config.json cannot express {', '.join(lost)}" if lost else None


def _named(setting: str, *architectures: Architecture) -> str:
    """The prefix of a setting whose block some architecture does not have, else its name."""
    prefix, _, _ = setting.rpartition(".")
    return prefix if prefix and any(arch.setting(prefix) is None for arch in architectures) else setting


def _tensor_mismatch(arch: Architecture, source: Family, target: Family) -> str | None:
    ours, theirs = (
        {name: placed.rule.canonical_shape(arch) for name, placed in family.placements(arch).items()}
        for family in (source, target)
    )
    if extra := ours.items() - theirs.items():
        return f"it does not have {len(extra)} of the tensors, for example {min(extra)[0]}"
    if missing := theirs.items() - ours.items():
        return f"it needs {len(missing)} more tensors, for example {min(missing)[0]}"
    return None
