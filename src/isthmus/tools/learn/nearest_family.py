"""The family to start from when no mapping is proven: the one that knows the settings of a config best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isthmus.families.family import Family
from isthmus.families.known_keys import IGNORED_KEYS, is_metadata, keys_read
from isthmus.families.rules.common_settings import is_dropout
from isthmus.tools.learn.related_family import UNREADABLE


@dataclass(frozen=True, slots=True)
class Relative:
    """A family, and in what the settings of a config differ from its own."""

    family: str
    unread: tuple[str, ...]
    """Settings of the config that the family does not read."""
    missing: tuple[str, ...]
    """Settings of the family that the config does not have."""

    @property
    def description(self) -> str:
        """A sentence."""
        clauses = [f"does not read {', '.join(self.unread)}"] if self.unread else []
        clauses += [f"reads {', '.join(self.missing)}, which the config lacks"] if self.missing else []
        differences = " and ".join(clauses) or "has the same settings"
        return f"The nearest family is {self.family}, which {differences}."


def nearest_family(config: Mapping[str, Any], families: Mapping[str, Family]) -> Relative:
    """The family with the fewest settings that it or the config has alone; ``config`` is that of a language model.

    Families of multimodal classes are not compared.
    """
    settings = {
        name for name in config if not (is_metadata(name) or is_dropout(name) or name in IGNORED_KEYS)
    }  # without those that do not tell models apart

    def relative(family: Family) -> Relative:
        keys = {key.hf for key in family.keys.values()}
        try:
            read = keys_read(family, config)
        except UNREADABLE:  # the config has not all that the family needs
            read = keys | family.fixed.keys()
        return Relative(family.name, tuple(sorted(settings - read)), tuple(sorted(keys - config.keys())))

    relatives = [relative(family) for family in families.values() if family.nested is None]
    return min(relatives, key=lambda each: len(each.unread) + len(each.missing))
