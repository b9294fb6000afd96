"""Records of TRL, verl, slime and GSM8K become prompts with the columns that rewards read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from isthmus.data.chat.rollout_records import PromptRecord, parse_prompt
from isthmus.data.readers.chunks import Record
from isthmus.data.readers.file_formats import check_columns, rename_fields
from isthmus.errors import DataError

Q = {"role": "user", "content": "2 + 2?"}
A = {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}


def parse(value: dict[str, Any]) -> PromptRecord:
    return parse_prompt(Record(value, "a.jsonl:3"))


@pytest.mark.parametrize(
    ("value", "prompt", "columns"),
    [
        ({"prompt": "2 + 2?", "answer": "4"}, "2 + 2?", {"answer": "4"}),
        ({"prompt": [Q], "answer": None}, [Q], {"answer": None}),
        ({"prompt": json.dumps([Q])}, [Q], {}),
        ({"prompt": [Q, A, Q]}, [Q, A, Q], {}),
        ({"messages": [SYSTEM, Q], "solution": "4"}, [SYSTEM, Q], {"solution": "4"}),
        ({"conversations": [{"from": "human", "value": "2 + 2?"}], "label": 4}, [Q], {"label": 4}),
        ({"question": "2 + 2?", "answer": "2 and 2.\n#### 4"}, "2 + 2?", {"answer": "2 and 2.\n#### 4"}),
        ({"problem": "2 + 2?", "solution": "4"}, "2 + 2?", {"solution": "4"}),
        ({"system": "Be brief.", "query": "2 + 2?"}, [SYSTEM, Q], {}),
        ({"prompt": "2 + 2?", "question": "Add."}, "2 + 2?", {"question": "Add."}),
    ],
)
def test_prompts_and_columns(value: dict[str, Any], prompt: Any, columns: dict[str, Any]) -> None:
    assert parse(value) == PromptRecord(prompt, None, columns, "a.jsonl:3")


def test_ground_truth_of_verl_is_a_column() -> None:
    value = {
        "data_source": "openai/gsm8k",
        "prompt": [Q],
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "answer": "2 and 2.\n#### 4"},
    }
    columns = {name: cell for name, cell in value.items() if name != "prompt"}
    assert parse(value).columns == columns | {"ground_truth": "4"}


def test_data_columns_rename_the_keys_of_slime() -> None:
    columns = {"prompt": "input", "answer": "label"}
    check_columns(columns)
    record = rename_fields(Record({"input": [Q], "label": "4"}, "a.jsonl:3"), columns)
    assert parse_prompt(record) == PromptRecord([Q], None, {"answer": "4"}, "a.jsonl:3")


def test_tools_are_no_column() -> None:
    result = parse({"prompt": [Q], "tools": [{"name": "add"}]})
    assert result.tools == [{"type": "function", "function": {"name": "add"}}]
    assert result.columns == {}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"text": "2 + 2?"}, "no prompt in a record with the keys text. Expected one of: prompt, messages"),
        ({"prompt": None, "answer": "4"}, "no prompt in a record with the keys answer, prompt"),
        ({"prompt": " "}, "prompt is empty"),
        ({"messages": []}, "messages is empty"),
        ({"prompt": 4}, "prompt is 4. Expected a text or messages"),
        ({"messages": [Q, A]}, "the last message of messages is of the assistant. Expected the user's"),
        ({"prompt": "q", "completions": "a"}, "the field completions has the name of an argument"),
    ],
)
def test_bad_records(value: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=f"^a.jsonl:3: {why}"):
        parse(value)
