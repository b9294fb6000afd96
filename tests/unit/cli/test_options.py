"""The options of a command are one dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from isthmus.cli.options import Json, verb


@dataclass(frozen=True, kw_only=True, slots=True)
class CountOptions:
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name.")]
    number: Annotated[int, typer.Option(min=1, metavar="N", help="A number.")] = 2
    json: Json = False


def count(options: CountOptions) -> int:
    """Print the options."""
    print(options)
    return 3


def test_a_command_has_the_fields_of_its_options_as_parameters() -> None:
    command = verb(count)
    parameters = signature(command).parameters
    assert command.__doc__ == "Print the options."
    assert [(name, parameter.default) for name, parameter in parameters.items()] == [
        ("name", Parameter.empty),
        ("number", 2),
        ("json", False),
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a"], CountOptions(name="a")),
        (["a", "--number", "5", "--json"], CountOptions(name="a", number=5, json=True)),
    ],
)
def test_a_command_passes_its_options_as_one_object(words: list[str], expected: CountOptions) -> None:
    app = typer.Typer()
    app.command()(verb(count))
    result = CliRunner().invoke(app, words)
    assert result.output == f"{expected}\n"


@pytest.mark.slow
def test_a_limit_of_an_option_is_checked() -> None:
    app = typer.Typer()
    app.command()(verb(count))
    result = CliRunner().invoke(app, ["a", "--number", "0"])
    assert result.exit_code == 2 and "CountOptions" not in result.output
