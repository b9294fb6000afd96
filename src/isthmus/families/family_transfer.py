"""A model in the words of another family, where these say all of it."""

from __future__ import annotations

from dataclasses import fields, replace

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family


def restate(arch: Architecture, source: Family, target: Family) -> Architecture:
    """The same model as one of ``target``.

    What a family can say is what it reads again in a config of its own: a field that it has no key for, a new one too,
    comes back as something else.

    Raises:
        UsageError: its configs cannot say this architecture, or it has other tensors; names both.
    """
    if source.name == target.name:
        return arch
    wanted = replace(arch, family=target.name)
    why = _unsaid(wanted, target) or _without_home(wanted, source, target)
    if why is not None:
        raise UsageError(f"this {source.name} model cannot be exported as {target.name}: {why}.")
    return wanted


def _unsaid(wanted: Architecture, target: Family) -> str | None:
    """What a config of the family does not say."""
    try:
        found = target.to_architecture(target.to_hf_config(wanted))
    except (DataError, UsageError) as error:
        return str(error).removesuffix(".")
    lost = [
        f"{field.name}={getattr(wanted, field.name)} (it would be {getattr(found, field.name)})"
        for field in fields(Architecture)
        if getattr(wanted, field.name) != getattr(found, field.name)
    ]
    return f"its config.json has no words for {', '.join(lost)}" if lost else None


def _without_home(wanted: Architecture, source: Family, target: Family) -> str | None:
    """Tensors that only one of the families has."""
    had, has = (
        {name: placed.rule.canonical_shape(wanted) for name, placed in family.placements(wanted).items()}
        for family in (source, target)
    )
    if strange := had.items() - has.items():
        return f"{len(strange)} tensors have no place in it, {min(strange)[0]} for one"
    if missing := has.items() - had.items():
        return f"it needs {len(missing)} more tensors, {min(missing)[0]} for one"
    return None
