from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.cli.cli_args import config_and_overrides, spread_data
from isthmus.errors import UsageError


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
