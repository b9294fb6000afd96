"""Parses ``--data`` with several files, and the arguments of a command: a config file and ``key=value`` settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from isthmus.config.presets import PREFIX, Kind, config_path
from isthmus.errors import UsageError


def spread_data(argv: Sequence[str]) -> list[str]:
    """``--data a b`` becomes ``--data a --data b``. An option, a setting or a YAML file ends the list."""
    spread: list[str] = []
    files = -1  # number of files after the last --data; -1: not after --data
    for position, word in enumerate(argv):
        if word == "--":
            return [*spread, *argv[position:]]
        if word == "--data":
            files = 0
        elif files >= 0:
            if files and (word.startswith("-") or is_setting(word) or is_config(word)):
                files = -1
            else:
                if files:
                    spread.append("--data")
                files += 1
        spread.append(word)
    return spread


def config_and_overrides(words: Sequence[str], kind: Kind = "train") -> tuple[Path | None, list[str]]:
    """The config file (or model, by ``kind``), if one is given, and the settings in order."""
    configs, overrides = configs_and_overrides(words)
    if len(configs) > 1:
        raise UsageError(f"got two config files, {configs[0]} and {configs[1]}; give one of them.")
    return config_path(configs[0], kind) if configs else None, overrides


def configs_and_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The config files and presets, and the settings, each in order."""
    configs: list[str] = []
    overrides: list[str] = []
    for word in words:
        if not is_setting(word) and not is_config(word):
            raise UsageError(
                f"{word!r} is not a config file (*.yaml), a preset ({PREFIX}NAME) or a setting (key=value)."
            )
        (overrides if is_setting(word) else configs).append(word)
    return configs, overrides


def is_config(word: str) -> bool:
    return word.startswith(PREFIX) or word.lower().endswith((".yaml", ".yml"))


def is_setting(word: str) -> bool:
    key, equals, _ = word.partition("=")
    return bool(equals) and key.replace(".", "").replace("_", "").replace("-", "").isalnum()
