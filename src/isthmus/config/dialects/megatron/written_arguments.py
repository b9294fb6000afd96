"""The settings of a run as Megatron-LM's arguments, by name, and the settings that no argument expresses."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from isthmus.config.dialects.megatron.known_args import SETTINGS, TABLES, is_default, words_of
from isthmus.config.dialects.translation import OptionRemark, Status, grouped
from isthmus.config.schema import RunConfig


class WrittenArguments:
    """The inverse of ``Arguments``: each ``write_*`` function is beside the ``put_*`` function that it inverts."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.remarks: list[OptionRemark] = []
        self._values: dict[str, Any] = {}
        self._expressed: set[str] = set()
        self._also_defaults: set[str] = set()

    def put(self, *settings: str) -> None:
        """Write settings that are one argument with the same value."""
        for setting in settings:
            value: Any = reduce(getattr, setting.split("."), self.config)
            self.set(SETTINGS[setting], value, setting)

    def set(self, name: str, value: Any, *settings: str, also_default: bool = False) -> None:
        """Write an argument, which expresses ``settings``; None leaves it out, and so does Megatron-LM's default unless
        ``also_default``."""
        self._values[name] = value
        if also_default:
            self._also_defaults.add(name)
        self._expressed.update(settings)

    def remark(self, setting: str, status: Status, reason: str) -> None:
        """``setting`` is expressed, but not exactly."""
        self._expressed.add(setting)
        self.remarks.append(OptionRemark(setting, status, reason))

    def words(self) -> Iterator[list[str]]:
        """Each flag with its words."""
        for name, value in self._values.items():
            if name in self._also_defaults or not is_default(name, value):
                yield words_of(name, value)

    def remark_on_the_rest(self) -> None:
        """Add a remark for each setting that differs from its default and that no argument expresses."""
        rest: list[OptionRemark] = []
        settings = self.config.model_dump(mode="json", exclude_defaults=True)
        for section, inner in settings.items():
            names = {f"{section}.{name}": value for name, value in inner.items()} if isinstance(inner, dict) else {}
            for name, value in (names or {section: inner}).items():
                if name not in self._expressed:
                    why = TABLES["unwritten"].get(name, "Megatron-LM has no such argument.")
                    rest.append(OptionRemark(f"{name}={value}", "unsupported", why))
        self.remarks += grouped(rest)
