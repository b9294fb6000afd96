"""What every section of settings is made of."""

from __future__ import annotations

import os
from typing import Annotated, NoReturn

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

PathText = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
# A mapping key is the likelier slip than a file that is named like one, so only text becomes a list of one.
Paths = Annotated[
    tuple[PathText, ...],
    BeforeValidator(
        lambda value: [value] if isinstance(value, str) else value, json_schema_input_type=str | tuple[PathText, ...]
    ),
    Field(strict=False),
]
Count = Annotated[int, Field(ge=1)]
# Elsewhere 0 is a usual spelling of "never"; here there is one inner form of it, so that no code can divide by it.
Interval = Annotated[
    Count | None,
    BeforeValidator(
        lambda value: None if type(value) is int and value == 0 else value,
        json_schema_input_type=Annotated[int, Field(ge=0)] | None,
    ),
]


def refuse(key: str, reason: str) -> NoReturn:
    """Report a clash between settings at the one of them that is to be changed; ``key`` is relative to the section."""
    # Braces are format marks to pydantic.
    raise PydanticCustomError("clash", "{reason}", {"reason": reason, "key": key})


def lacks(key: str) -> NoReturn:
    """Report a setting that must be given in this case, though not in every one; ``key`` as for :func:`refuse`."""
    raise PydanticCustomError("lacks", "Field required", {"key": key})


class Section(BaseModel):
    """Settings that belong together: immutable, of exactly the stated types, without unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
