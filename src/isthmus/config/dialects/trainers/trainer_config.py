"""The keys of a trainer's config, which are mapped to settings, ignored with a reason, or refused."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, get_args

from isthmus.config.dialects.translation import Translation, World
from isthmus.config.recipes import RecipeName
from isthmus.config.schema import RunConfig
from isthmus.config.setting_errors import trainers
from isthmus.config.yaml_text import Syntax, read_value
from isthmus.errors import UsageError

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_OFF: tuple[Any, ...] = (None, "", False, 0, 0.0, "none", "no", [], {})
"""Values with which a key has no effect."""
_HYDRA = ("verl",)
"""Programs without TrainingArguments."""


@cache
def tables() -> Mapping[str, Any]:
    """Aliases, defaults and the keys that change a training in a way that Isthmus does not have."""
    return dict(read_value(Path(__file__).with_name("keys.yaml").read_text(encoding="utf-8")))


class TrainerConfig:
    """The keys of one config; those of transformers' TrainingArguments have its names in all programs.

    A rule takes keys with ``text``, ``number``, ``flag`` and so on, puts settings, and ignores or refuses the rest.
    """

    def __init__(self, program: str, values: Mapping[str, Any], nproc: int | None) -> None:
        self.program = program
        self.translation: Translation = Translation(recipe="sft", world=World(nproc_per_node=nproc))
        self.errors: list[str] = []
        aliases = tables()["aliases"].get(program, {})
        values = dict(_with_negations(program, values))
        self._written = {aliases.get(name, name): name for name in values}
        self._values = {aliases.get(name, name): value for name, value in values.items()}
        self._defaults: Mapping[str, Any] = {**tables()["defaults"]["common"], **tables()["defaults"].get(program, {})}
        self._handled: set[str] = set()
        self._answered: set[str] = set()

    @property
    def recipe(self) -> RecipeName:
        return self.translation.recipe

    def has(self, name: str) -> bool:
        """Whether the config has a value for ``name``."""
        return self._values.get(name) not in (None, "")

    def value(self, name: str) -> Any:
        """The value of the config, or the default of the program; ``name`` is handled then."""
        self._handled.add(name)
        value = self._values.get(name)
        return self._defaults.get(name) if value in (None, "") else value

    def text(self, name: str) -> str | None:
        value = self.value(name)
        return None if value is None else str(value)

    def flag(self, name: str) -> bool:
        value = self.value(name)
        if isinstance(value, str) and value.lower() in (*_TRUE, *_FALSE):
            return value.lower() in _TRUE
        return bool(value)

    def number(self, name: str) -> float | None:
        """The number, also if it is text: YAML 1.1 reads 1e-4 as text."""
        value = self.value(name)
        if value is None or isinstance(value, bool):
            return None
        try:
            number = value if isinstance(value, int | float) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            self.refuse(name, "must be a number")
            return None
        return number

    def integer(self, name: str) -> int | None:
        number = self.number(name)
        return None if number is None else int(number)

    def real(self, name: str) -> float:
        """The number, 0 without one."""
        return float(self.number(name) or 0.0)

    def words(self, name: str) -> list[str]:
        """A list, or text with commas."""
        value = self.value(name)
        if isinstance(value, list):
            return [str(item) for item in value]
        return [word.strip() for word in str(value).split(",") if word.strip()] if value else []

    def numbers(self, name: str) -> list[float]:
        """Numbers in a list, or in text with commas."""
        try:
            return [float(word) for word in self.words(name)]
        except ValueError:
            self.refuse(name, "must be a list of numbers")
            return []

    def entries(self, name: str) -> list[dict[str, Any]]:
        """A list of mappings; text is a list of one ``path``."""
        value = self.value(name)
        items = value if isinstance(value, list) else [] if value is None else [value]
        items = [{"path": item} if isinstance(item, str) else item for item in items]
        if all(isinstance(item, dict) for item in items):
            return items
        self.refuse(name, "must be a list of data sets, each with a path")
        return []

    def origin(self, *names: str) -> str:
        parts = [f"{self._written[name]}: {_shown(self._values[name])}" for name in names if self.has(name)]
        return ", ".join(parts) or f"default of {self.program}"

    def put(self, setting: str, value: Any, *names: str) -> None:
        """A setting whose value comes from keys."""
        self._answer(*names)
        self.translation.put(setting, value, self.origin(*names))

    def copy(self, read: Callable[[str], Any], settings: Mapping[str, str]) -> None:
        """Put the settings of keys that the config has, by key; ``read`` is such as :meth:`number`."""
        for name, setting in settings.items():
            if self.has(name):
                self.put(setting, read(name), name)

    def ignore_present(self, reason: str, *names: str) -> None:
        for name in names:
            if self.has(name):
                self.ignore(name, reason)

    def is_on(self, name: str) -> bool:
        """Whether the config has this switch and it is on; one that is off is answered."""
        if self.has(name) and not self.flag(name):
            self.ignore(name, "It is off.")
        return self.has(name) and self.flag(name)

    def _answer(self, *names: str) -> None:
        self._answered.update(names)
        self._handled.update(names)

    def ignore(self, name: str, reason: str) -> None:
        """``name`` has no setting; the training is the same, or ``reason`` says what differs."""
        self._answer(name)
        if name in self._written:
            self.translation.remark(self.origin(name) if self.has(name) else self._written[name], "ignored", reason)

    def different(self, name: str, reason: str) -> None:
        """``name`` has no equal setting, and ``reason`` says what the training does instead."""
        self._answer(name)
        if self.has(name):
            self.translation.remark(self.origin(name), "different", reason)

    def refuse(self, name: str, reason: str) -> None:
        """The training of the config cannot be had with settings."""
        self._answer(name)
        self.errors.append(f"{self.origin(name) if self.has(name) else name}  {reason}")

    def stop(self, name: str, reason: str) -> NoReturn:
        """The config is not of a training that Isthmus has, so its other keys do not matter."""
        raise UsageError(f"the config of {self.program}  {self.origin(name)}  {reason}")

    def translate_rest(self) -> None:
        """The keys that no rule has handled, by the tables."""
        for name in self._values:
            if name not in self._handled:
                self._translate_key(name)
            elif name not in self._answered:
                is_off = self._values[name] in _OFF
                self.ignore(name, "It is off." if is_off else "It has no effect with the other keys.")
        if self.errors:
            count = f"{len(self.errors)} keys" if len(self.errors) > 1 else "a key"
            lines = "\n  ".join(self.errors)
            raise UsageError(f"the config of {self.program} has {count} without an equal setting:\n  {lines}")

    def _translate_key(self, name: str) -> None:
        written, value = self._written[name], self._values[name]
        if value is None or value == "":
            self.ignore(name, "It has no value.")
        elif (reason := _reason("refused", self.program, written, value)) is not None:
            self.refuse(name, reason)
        elif (answer := _answer(self.program, written)) is not None:
            self._by_answer(name, value, answer)
        elif (reason := _reason("ignored", self.program, written, None)) is not None:
            self.ignore(name, reason)
        elif (reason := _reason("refused", self.program, written, None)) is not None:
            self.ignore(name, "It is off.")
        else:
            near = difflib.get_close_matches(written, known_keys(self.program), n=1)
            guess = f" (did you mean {near[0]}?)" if near else ""
            self.refuse(name, f"is not a known key of {self.program}{guess}; remove it if the training is the same")

    def _by_answer(self, name: str, value: Any, answer: str) -> None:
        setting, _, explanation = answer.partition(", ")
        if setting == "no":
            is_setting = "." in explanation.partition(" ")[0]
            self.ignore(name, f"{explanation if is_setting else explanation[:1].upper() + explanation[1:]}.")
        elif explanation.startswith("="):
            if self.flag(name):
                self.put(setting, read_value(explanation[1:]), name)
            else:
                self.ignore(name, "It is off.")
        elif explanation or setting.startswith("--"):
            self.different(name, f"See {answer}.")
        else:
            self.put(setting, _typed(setting, value), name)


def _with_negations(program: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """``--no_NAME`` of a command line is ``NAME: false``."""
    for name, value in values.items():
        rest = name.removeprefix("no_")
        negated = rest != name and value is True and rest in known_keys(program) and name not in known_keys(program)
        yield (rest, False) if negated else (name, value)


def known_keys(program: str) -> list[str]:
    """The keys of ``program`` in the table of answers."""
    return [*trainers()[program], *(() if program in _HYDRA else trainers()["common"])]


def _answer(program: str, name: str) -> str | None:
    return trainers()[program].get(name, None if program in _HYDRA else trainers()["common"].get(name))


def _reason(status: str, program: str, name: str, value: Any) -> str | None:
    """Why ``name`` with ``value`` is refused or ignored; ``name=value`` gives a value without effect."""
    for table in (tables()[status].get(program, {}), tables()[status].get("common", {})):
        for reason, patterns in table.items():
            for entry in patterns.split():
                pattern, equals, neutral = entry.partition("=")
                if fnmatchcase(name, pattern):
                    is_off = value in _OFF or (bool(equals) and str(value).lower() == neutral.lower())
                    return None if status == "refused" and value is not None and is_off else str(reason)
    return None


def _typed(setting: str, value: Any) -> Any:
    """Text that is a number for a setting with a number, a number that is text, a list for a setting with several."""
    annotation: Any = RunConfig
    for name in setting.split("."):
        annotation = annotation.model_fields[name].annotation
    if isinstance(value, str) and str not in (annotation, *get_args(annotation)):
        try:
            read = read_value(value)
        except Syntax:
            return value
        return read if isinstance(read, bool | int | float) else value
    if isinstance(value, int | float) and not isinstance(value, bool) and annotation in (str, str | None):
        return str(value)
    return value


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."
