"""Commands whose options are one dataclass, options of several commands, and words of the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from inspect import Parameter, Signature, get_annotations
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from isthmus.config.presets import PREFIX, Kind, config_path
from isthmus.errors import UsageError

_DECLARED = "typer"
"""Key in the metadata of a field: makes the parameter of typer from the name of the field."""


def argument(metavar: str, help: str, default: Any = MISSING, **settings: Any) -> Any:
    """A field that is a positional argument; ``settings`` are those of ``typer.Argument``."""
    return field(
        default=default, metadata={_DECLARED: lambda name: typer.Argument(metavar=metavar, help=help, **settings)}
    )


def option(metavar: str | None, help: str, default: Any = None, *names: str, **settings: Any) -> Any:
    """A field that is an option with a value, by default of the field's name."""
    return field(
        default=default, metadata={_DECLARED: lambda name: typer.Option(*names, metavar=metavar, help=help, **settings)}
    )


def flag(help: str, spelling: str | None = None, **settings: Any) -> Any:
    """A field that is true with an option, which has no ``--no-`` form."""

    def declare(name: str) -> Any:
        return typer.Option(spelling or f"--{name.replace('_', '-')}", help=help, **settings)

    return field(default=False, metadata={_DECLARED: declare})


def verb(function: Callable[[Any], int]) -> Callable[..., int]:
    """A typer command whose options are the fields of the dataclass that ``function`` takes as ``options``.

    Fields of its base classes, which other commands have too, come last.
    """
    options = get_type_hints(function)["options"]
    hints = get_type_hints(options)
    order = [name for kind in options.__mro__ for name in get_annotations(kind)]

    def command(**values: Any) -> int:
        return function(options(**values))

    parameters = []
    for item in sorted(fields(options), key=lambda item: order.index(item.name)):
        declare = item.metadata.get(_DECLARED)
        parameters.append(
            Parameter(
                item.name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if item.default is MISSING else item.default,
                annotation=hints[item.name] if declare is None else Annotated[hints[item.name], declare(item.name)],
            )
        )
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return command


def group(help: str) -> typer.Typer:
    """A command with subcommands."""
    return typer.Typer(help=help, context_settings={"help_option_names": ["-h", "--help"]})


@dataclass(frozen=True, kw_only=True, slots=True)
class DebugOptions:
    debug: bool = flag("Show the traceback of an error and the output of every rank.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultOptions(DebugOptions):
    json: bool = flag("Print the result as JSON.")


def _trust(context: typer.Context, value: bool) -> bool:
    if value:
        from isthmus.files.checked_files import trusting

        context.with_resource(trusting())
    return value


TRUST = partial(
    flag, "Do not check the checksums of what is read: damage may stay undetected.", "--trust", callback=_trust
)
TRUST_MODEL_CODE = partial(flag, "Run modelling code of the model folder.")
HF_LIKE = partial(
    option, "HF_DIR", "Model folder, or preset:NAME, whose config describes a checkpoint without a config."
)
BIN = partial(
    flag,
    "Read pytorch_model*.bin instead of safetensors. These files are pickles: none of their code is run, and a file "
    "with code is refused. Prefer safetensors if the model has them.",
)
DTYPE = partial(option, "DTYPE", "fp32, bf16 or fp16; default: the dtype of each tensor.")
PUSH = partial(option, "REPO_ID", "Upload the Hugging Face folder to this repository at the end.")
PUBLIC = partial(flag, "Make a repository that --push creates public.")
CHAT_TEMPLATE = partial(option, "TEMPLATE", "Chat template, as chat.template of a run.")


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
    for word in words:
        if not is_setting(word) and not is_config(word):
            raise UsageError(
                f"{word!r} is not a config file (*.yaml), a preset ({PREFIX}NAME) or a setting (key=value)."
            )
    return [word for word in words if not is_setting(word)], [word for word in words if is_setting(word)]


def is_config(word: str) -> bool:
    return word.startswith(PREFIX) or word.lower().endswith((".yaml", ".yml"))


def is_setting(word: str) -> bool:
    key, equals, _ = word.partition("=")
    return bool(equals) and key.replace(".", "").replace("_", "").replace("-", "").isalnum()
