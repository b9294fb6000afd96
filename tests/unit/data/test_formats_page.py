"""The examples on the page of data formats are what they say they are."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isthmus.data.chat.chat_records import Conversation, LabelledRecord, PreferenceRecord, kinds_of, parse_record
from isthmus.data.chat.preference_records import parse_labelled, parse_preference
from isthmus.data.chat.rollout_records import parse_prompt
from isthmus.data.readers.chunks import Record
from unit.data.records import read_records

PAGE = Path(__file__).resolve().parents[3] / "docs/reference/data-formats.md"
KINDS = {
    "Text": ("text", str),
    "Chats": ("chat", Conversation),
    "Preference pairs": ("preference", PreferenceRecord),
    "Answers with labels": ("unpaired", LabelledRecord),
}


PARSERS: dict[str, Callable[[Record], Any]] = {
    "text": parse_record,
    "chat": parse_record,
    "preference": parse_preference,
    "unpaired": parse_labelled,
}


def examples(section: str) -> list[tuple[str, str]]:
    """The ending and the text of each file in a section."""
    text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```(jsonl|csv)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("section", KINDS)
def test_examples_have_the_kind_of_their_section(tmp_path: Path, section: str) -> None:
    name, kind = KINDS[section]
    result = examples(section)
    assert {ending for ending, _ in result} == {"jsonl", "csv"}
    for ending, text in result:
        path = tmp_path / f"example.{ending}"
        path.write_text(text)
        records = list(read_records(path))
        assert len(records) >= 1 and (ending == "csv" or len(records) == text.count("\n"))
        for record in records:
            kinds = kinds_of(record)
            assert name in kinds if name == "unpaired" else kinds[0] == name
            assert isinstance(PARSERS[name](record), kind)


def test_examples_of_prompts_have_a_prompt_and_a_right_answer(tmp_path: Path) -> None:
    for ending, text in examples("Prompts"):
        path = tmp_path / f"example.{ending}"
        path.write_text(text)
        for record in map(parse_prompt, read_records(path)):
            assert record.prompt in ("2 + 2?", [{"role": "user", "content": "2 + 2?"}])
            assert {"answer", "solution", "ground_truth"} & record.columns.keys()


def test_pair_examples_are_equal(tmp_path: Path) -> None:
    said = set()
    for ending, text in examples("Preference pairs"):
        path = tmp_path / f"example.{ending}"
        path.write_text(text)
        for pair in map(parse_preference, read_records(path)):
            said.add(tuple(turn["content"] for turns in (pair.prompt, pair.chosen, pair.rejected) for turn in turns))
    assert said == {("hi", "Hello.", "Hmpf."), ("Greet in this language.\nFrench", "Bonjour.", "Hello.")}
