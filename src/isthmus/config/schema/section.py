"""The base class of all sections of settings, their types and their errors."""

from __future__ import annotations

import os
from typing import Annotated, ClassVar, NoReturn

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

PathText = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]


def listed(value: object) -> object:
    """Text becomes a list of one; other values are more likely mistakes."""
    return [value] if isinstance(value, str) else value


Paths = Annotated[
    tuple[PathText, ...],
    BeforeValidator(listed, json_schema_input_type=str | tuple[PathText, ...]),
    Field(strict=False),
]
# Bounds far beyond any run, within which no library overflows, starts a million threads or computes for ever.
_MAX_COUNT = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=_MAX_COUNT)]
Sequences = Annotated[int, Field(ge=1, le=2**20)]
Length = Annotated[int, Field(ge=1, le=2**24)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
# 0 and null mean never. Only null is passed on, so that no code divides by 0.
Interval = Annotated[
    Count | None,
    BeforeValidator(
        lambda value: None if type(value) is int and value == 0 else value,
        json_schema_input_type=Annotated[int, Field(ge=0, le=_MAX_COUNT)] | None,
    ),
]


def refuse(key: str, reason: str) -> NoReturn:
    """Raise an error about contradicting settings; ``key`` (relative to the section) is the one to change."""
    # pydantic formats braces.
    raise PydanticCustomError("clash", "{reason}", {"reason": reason, "key": key})


def lacks(key: str) -> NoReturn:
    """Raise an error about a setting that is required in this case; ``key`` as for :func:`refuse`."""
    raise PydanticCustomError("lacks", "Field required", {"key": key})


class Section(BaseModel):
    """A section of settings: immutable, strictly typed, without unknown keys."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    exclusive: ClassVar[tuple[str, ...]] = ()
    """Settings of which one may be given; the command line's, or a file's, replaces that of its bases."""
