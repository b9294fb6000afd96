"""What becomes of the keys that only Primus has."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache

from isthmus.config.dialects.megatron.model_args import ARGUMENTS
from isthmus.config.dialects.primus.primus_keys import NOT_AT_ALL, OTHERWISE, REFUSED


def own(key: str) -> tuple[str, str] | None:
    """What becomes of a key that only Primus has, and why."""
    for became, table in (("otherwise", OTHERWISE), ("not at all", NOT_AT_ALL), ("refused", REFUSED)):
        for why, patterns in table.items():
            if any(fnmatchcase(key, pattern) for pattern in patterns.split()) and key not in ARGUMENTS:
                return became, why
    return None


@cache
def own_keys() -> list[str]:
    """Keys that only Primus has, but for those whose names are patterns."""
    tables = (OTHERWISE, NOT_AT_ALL, REFUSED)
    return [key for table in tables for keys in table.values() for key in keys.split() if "*" not in key]
