"""Rewards by functions of the user, with the signature of TRL's or of verl's."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from isthmus.errors import IsthmusError, MissingInput, UsageError, escaped
from isthmus.recipes.rollout.answer_batch import AnswerBatch, missing_column

_FILE = re.compile(r"(.+\.py):([^:]*)")
_MODULE = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*):([A-Za-z_]\w*)")
_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
_ANSWER = "solution_str"
"""Argument of verl's functions: the text of one answer."""
_FRAMES = 3
"""Last frames of the user's code in a message."""
_LONGEST = 2000
"""Characters of an exception in a message."""
_STDLIB = sysconfig.get_path("stdlib")
_modules: dict[Path, ModuleType] = {}
"""Modules of files, each of which is run once in a process."""


def is_function(setting: str) -> bool:
    """Whether a text of ``rollout.reward`` names a function: ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``."""
    return setting.endswith(".py") or _FILE.fullmatch(setting) is not None or _MODULE.fullmatch(setting) is not None


class FunctionReward:
    """A function that is called with the arguments of TRL and the fields of the records, as far as it accepts them.

    One with an argument ``solution_str`` has verl's signature: it is called for each answer, with ``solution_str`` and
    the fields of its record, and returns a number or a mapping with ``score``.
    """

    def __init__(self, setting: str) -> None:
        """Import the function; its file or module is run at the first time.

        Raises:
            MissingInput: there is no such file, module or function.
            UsageError: the file fails, or the name is not that of a function.
        """
        self.setting = setting
        self._function = _imported(setting)
        parameters = _parameters(self._function)
        named = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        takes_all = not parameters or any(one.kind == one.VAR_KEYWORD for one in parameters)
        self._names = None if takes_all else {parameter.name for parameter in named}
        known = (*_ARGUMENTS, _ANSWER)
        self._required = [one.name for one in named if one.default is one.empty and one.name not in known]
        self._takes_one = any(parameter.name == _ANSWER for parameter in named)

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise DataError if a parameter without a default is not in ``columns``."""
        for name in self._required:
            if name not in columns:
                hint = "Correct the parameter, give it a default, or map a field to it with data.columns."
                raise missing_column(self.setting, name, columns, hint)

    def __call__(self, batch: AnswerBatch) -> Any:
        """What the function returns; a coroutine of an asynchronous one."""
        if self._takes_one:
            return self._scores(batch)
        arguments: Mapping[str, Any] = {
            **batch.columns,
            "prompts": batch.prompts,
            "completions": batch.completions,
            "completion_ids": [list(ids) for ids in batch.completion_ids],
            "trainer_state": batch.state,
            "log_extra": lambda column, values: batch.logged_columns.update({str(column): list(values)}),
            "log_metric": lambda name, value: batch.logged_metrics.update({str(name): float(value)}),
        }
        return self._call(arguments)

    def _call(self, arguments: Mapping[str, Any]) -> Any:
        names = arguments.keys() if self._names is None else arguments.keys() & self._names
        return self._function(**{name: arguments[name] for name in arguments if name in names})

    def _scores(self, batch: AnswerBatch) -> Any:
        """The scores of verl's function, or a coroutine of them."""
        results = [
            self._call({name: values[place] for name, values in batch.columns.items()} | {_ANSWER: text})
            for place, text in enumerate(batch.texts)
        ]
        return _gathered(results) if any(map(inspect.isawaitable, results)) else list(map(_score, results))


async def _gathered(results: list[Any]) -> list[Any]:
    return list(map(_score, await asyncio.gather(*results)))


def _score(result: Any) -> Any:
    return result.get("score", result) if isinstance(result, dict) else result


def failure(setting: str, error: BaseException) -> IsthmusError:
    """The error of a reward that raised: where, and the last lines of the traceback."""
    if isinstance(error, IsthmusError):
        return error
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_library(frame.filename)]
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    lines = [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line or ''}" for frame in frames[-_FRAMES:]]
    lines += "".join(traceback.format_exception_only(error)).rstrip().split("\n")
    shown = "".join(f"\n  {line}" for line in lines)
    return UsageError(
        f"rollout.reward {escaped(setting)} raised {type(error).__name__}{escaped(place)}. Correct it, or return None "
        f"for answers that it does not apply to.{escaped(shown)[:_LONGEST]}"
    )


def _is_library(filename: str) -> bool:
    """Whether code is not the user's: of Isthmus, Python or an installed package."""
    path = Path(filename)
    is_installed = "site-packages" in path.parts or path.is_relative_to(_STDLIB)
    return is_installed or path.parent == Path(__file__).parent or filename.startswith("<frozen")


def _parameters(function: Any) -> list[inspect.Parameter]:
    try:
        return [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # of a compiled library
        return []


def _imported(setting: str) -> Any:
    if setting.endswith(".py"):
        raise UsageError(f"rollout.reward {escaped(setting)} lacks a function. Give {escaped(setting)}:FUNCTION.")
    is_file = _FILE.fullmatch(setting)
    match = is_file or _MODULE.fullmatch(setting)
    assert match is not None  # see is_function
    source, name = match[1], match[2]
    module = _file_module(setting, Path(source)) if is_file else _named_module(setting, source)
    function = getattr(module, name, None)
    if callable(function):
        return function
    names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    near = get_close_matches(name, names, n=1)
    hint = f"Did you mean {near[0]}?" if near else f"It has: {', '.join(names) or 'none'}."
    if function is not None:
        raise UsageError(f"rollout.reward {escaped(setting)}: {name} is a {type(function).__name__}, not a function.")
    raise MissingInput(f"rollout.reward {escaped(setting)}: there is no function {name!r} in {escaped(source)}. {hint}")


def _file_module(setting: str, path: Path) -> ModuleType:
    path = path.expanduser()
    if not path.is_file():
        raise MissingInput(
            f"rollout.reward {escaped(setting)}: {escaped(str(path))} does not exist. Give the path of a Python file, "
            "from the current folder."
        )
    path = path.resolve()
    if path not in _modules:
        name = f"reward_file_{len(_modules)}_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None  # as for every .py file
        module = importlib.util.module_from_spec(spec)
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))  # it may import modules beside it
        sys.modules[name] = module  # dataclasses and pickle look their module up
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            raise failure(setting, error) from error
        _modules[path] = module
    return _modules[path]


def _named_module(setting: str, name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # the current folder, as for python -m
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise failure(setting, error) from error
        raise MissingInput(
            f"rollout.reward {escaped(setting)}: there is no module {error.name}. Give FILE.py:FUNCTION, or MODULE:"
            "FUNCTION of a module in the current folder or on PYTHONPATH."
        ) from error
    except (Exception, SystemExit) as error:
        raise failure(setting, error) from error
