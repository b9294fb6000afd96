"""Every form of preference data comes out as prompt, chosen and rejected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.data.chat.chat_records import PreferenceRecord, kinds_of
from isthmus.data.chat.preference_records import parse_preference
from isthmus.data.readers.chunks import Record
from isthmus.errors import DataError
from unit.data.records import read_records

S = {"role": "system", "content": "s"}
Q = {"role": "user", "content": "q"}
A, B = ({"role": "assistant", "content": words} for words in ("a", "b"))


def parse(value) -> PreferenceRecord:
    return parse_preference(Record(value, "p.jsonl:3"))


def said(role: str, value: str) -> dict[str, str]:
    return {"from": role, "value": value}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, ([Q], [A], [B])),
        ({"prompt": [S, Q], "chosen": [A], "rejected": [B]}, ([S, Q], [A], [B])),
        ({"prompt": "q", "chosen": [Q, A], "rejected": [Q, B]}, ([Q], [A], [B])),
        ({"prompt": "q", "chosen": [S, Q, A], "rejected": [S, Q, B]}, ([S, Q], [A], [B])),
        ({"chosen": [S, Q, A, Q, A], "rejected": [S, Q, A, Q, B]}, ([S, Q, A, Q], [A], [B])),
        ({"chosen": [Q, A, Q, A], "rejected": [Q, B]}, ([Q], [A, Q, A], [B])),
        ({"chosen": [Q, A], "rejected": [Q, A, Q, B]}, ([Q], [A], [A, Q, B])),
        ({"prompt": "q", "chosen": json.dumps([Q, A]), "rejected": json.dumps([Q, B])}, ([Q], [A], [B])),
        ({"prompt": "q", "chosen": "[a", "rejected": "[1]"},
         ([Q], [{**A, "content": "[a"}], [{**B, "content": "[1]"}])),
        (
            {"conversations": [said("human", "q")], "system": "s", "chosen": said("gpt", "a"), "rejected": A | B},
            ([S, Q], [A], [B]),
        ),
        ({"instruction": "q", "input": "", "chosen": "a", "rejected": "b"}, ([Q], [A], [B])),
        (
            {"chosen": "\n\nHuman: q\n\nAssistant: a\n\nHuman: q\n\nAssistant: a",
             "rejected": "\n\nHuman: q\n\nAssistant: a\n\nHuman: q\n\nAssistant: b\n\nstill b"},
            ([Q, A, Q], [A], [{**B, "content": "b\n\nstill b"}]),
        ),
        ({"prompt": "\n\nHuman: q\n\nAssistant:", "chosen": "a", "rejected": "b"}, ([Q], [A], [B])),
    ],
)  # fmt: skip
def test_formats_of_preference_records(value, expected):
    pair = parse(value)
    assert (pair.prompt, pair.chosen, pair.rejected) == expected
    assert pair.where == "p.jsonl:3" and pair.chosen != pair.rejected
    assert kinds_of(Record(value, ""))[0] == "preference"


def test_tools_and_equal_answers():
    pair = parse({"prompt": "q", "chosen": "a", "rejected": "a", "tools": [{"name": "f"}]})
    assert pair.chosen == pair.rejected
    assert pair.tools == [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"prompt": "q", "completion": "a"}, "not a preference pair"),
        ({"chosen": "a", "rejected": "b"}, "no user turn before chosen and rejected"),
        ({"chosen": [Q, A], "rejected": [{**Q, "content": "other"}, B]}, "no user turn"),
        ({"prompt": "q", "chosen": [Q], "rejected": [B]}, "chosen must continue the prompt with an assistant turn"),
        ({"prompt": "q", "chosen": "a", "rejected": []}, "rejected must continue the prompt"),
        (
            {"prompt": "q", "chosen": "a", "rejected": None},
            "not a preference pair: expected the keys chosen and rejected, got chosen, prompt",
        ),
        ({"prompt": "q", "chosen": "a", "rejected": 7}, "rejected must be text, got int"),
        ({"prompt": 7, "chosen": "a", "rejected": "b"}, "prompt must be text, got int"),
        ({"prompt": "other", "chosen": [Q, A], "rejected": [Q, B]}, "chosen must continue the prompt"),
    ],
)
def test_bad_pairs_are_reported_with_their_line(value, message):
    with pytest.raises(DataError) as caught:
        parse(value)
    assert str(caught.value).startswith("p.jsonl:3: ")
    assert message in str(caught.value)


def test_real_pairs(shared_data: Path):
    pairs = [parse_preference(record) for record in read_records(shared_data / "dpo_en_demo.json")]
    assert len(pairs) == 300
    assert all(pair.prompt[-1]["role"] == "user" and pair.chosen != pair.rejected for pair in pairs)
