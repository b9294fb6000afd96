"""The options of a command are one dataclass; words of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from isthmus.cli.options import ResultOptions, argument, config_and_overrides, flag, option, spread_data, verb
from isthmus.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class CountOptions(ResultOptions):
    name: str = argument("NAME", "A name.")
    number: int = option("N", "A number.", 2, "--number", "-n", min=1)
    as_is: bool = flag("No change.")


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
        ("as_is", False),
        ("json", False),  # of the base classes
        ("debug", False),
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a"], CountOptions(name="a")),
        (["a", "-n", "5", "--as-is", "--json"], CountOptions(name="a", number=5, as_is=True, json=True)),
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


@pytest.mark.slow
def test_a_flag_has_no_opposite() -> None:
    app = typer.Typer()
    app.command()(verb(count))
    assert CliRunner().invoke(app, ["a", "--no-as-is"]).exit_code == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("sft --data a b --out o", "sft --data a --data b --out o"),
        ("sft --data a --data b", "sft --data a --data b"),
        ("sft --data a optim.lr=1 c.yaml", "sft --data a optim.lr=1 c.yaml"),
        ("sft --data a b c.yaml d", "sft --data a --data b c.yaml d"),
        ("sft --data odd=name.json b", "sft --data odd=name.json --data b"),
        ("sft --data=a b.yaml", "sft --data=a b.yaml"),
        ("sft --data a -- --data b c", "sft --data a -- --data b c"),
    ],
)
def test_data_takes_many_files(words: str, expected: str) -> None:
    assert spread_data(words.split()) == expected.split()


def test_config_file_and_settings_in_any_order() -> None:
    words = ["optim.lr=1", "run.yaml", "data.files=[a, b]"]
    assert config_and_overrides(words) == (Path("run.yaml"), ["optim.lr=1", "data.files=[a, b]"])
    assert config_and_overrides([]) == (None, [])


@pytest.mark.parametrize("words", [["a.yaml", "b.yml"], ["train.steps"], ["data.json"], ["=3"]])
def test_other_words_are_refused(words: list[str]) -> None:
    with pytest.raises(UsageError):
        config_and_overrides(words)
