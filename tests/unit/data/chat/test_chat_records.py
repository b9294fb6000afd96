"""The kinds of records come out as one form, and bad ones are refused by file and line."""

from __future__ import annotations

import json

import pytest

from isthmus.data.chat.chat_records import Conversation, parse_record
from isthmus.data.readers.chunks import Record
from isthmus.errors import DataError

U = {"role": "user", "content": "q"}
A = {"role": "assistant", "content": "a"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
PARTS = [
    {"type": "reasoning", "value": "t"},
    {"type": "text", "value": "a"},
    {"type": "tool_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
    {"type": "tool_call", "value": {"name": "f", "arguments": '{"x": 1}'}},
]
KEYS = {"reasoning_content": "t", "tool_calls": [CALL, CALL]}


def parse(value) -> Conversation | str:
    return parse_record(Record(value, "d.jsonl:3"))


@pytest.mark.parametrize(
    ("value", "messages"),
    [
        ({"instruction": "q", "input": "", "output": "a"}, [U, A]),
        ({"instruction": "q", "output": "a"}, [U, A]),
        ({"instruction": "q", "input": "more", "output": "a"}, [{**U, "content": "q\nmore"}, A]),
        (
            {"instruction": "q", "input": None, "output": "a", "system": "s", "history": [["q", "a"]]},
            [{"role": "system", "content": "s"}, U, A, U, A],
        ),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, [U, A]),
        (
            {"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            [{"role": "system", "content": "s"}, U, A],
        ),
        ({"conversations": [U, A]}, [U, A]),
        ({"messages": [U, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]}, [U, A]),
        ({"messages": [{**U, "content": [{"type": "text", "value": "q"}]}, {**A, "content": ["a"]}]}, [U, A]),
        ({"messages": [{**U, "content": [{"text": "q"}]}, {**A, "content": {"type": "text", "text": "a"}}]}, [U, A]),
        ({"messages": [{**U, "content": [{"type": "input_text", "text": "q"}, ""]}, A]}, [U, A]),
        ({"messages": [{**U, "role": "Human"}, {**A, "role": "bot"}]}, [U, A]),
        (
            {"messages": [U, A, {"role": "tool_response", "content": "r"}, {"role": "environment", "content": "e"}, A]},
            [U, A, {"role": "tool", "content": "r"}, {"role": "tool", "content": "e"}, A],
        ),
        ({"query": "q", "response": "a"}, [U, A]),
        (
            {"query": "q", "response": "a", "history": [["q", "a"]], "system": "s"},
            [{"role": "system", "content": "s"}, U, A, U, A],
        ),
        ({"prompt": "q", "response": "a", "history": [["q", "a"]]}, [U, A, U, A]),
        ({"messages": [{**U, "role": "human"}, {**A, "weight": 0}]}, [U, {**A, "weight": 0}]),
        (
            {"messages": [U, {**A, "train": False}, {**A, "loss": True}, {**A, "weight": 1}, {**A, "training": 0}]},
            [U, {**A, "weight": 0}, A, A, {**A, "weight": 0}],
        ),
        ({"messages": [U, {**A, "thinking": "t"}]}, [U, {**A, "reasoning_content": "t"}]),
        ({"messages": [U, {**A, "reasoning": "t", "thinking": ""}]}, [U, {**A, "reasoning_content": "t"}]),
        ({"messages": [U, {"role": "assistant", "content": PARTS}]}, [U, {**A, **KEYS}]),
        ({"conversations": [U, {"from": "gpt", "value": PARTS}]}, [U, {**A, **KEYS}]),
        (
            {"messages": [U, {"role": "assistant", "content": [PARTS[0], {"type": "thinking", "thinking": "u"}]}]},
            [U, {**A, "content": "", "reasoning_content": "t\nu"}],
        ),
        ({"messages": json.dumps([U, A]), "text": "not this"}, [U, A]),
        ({"messages": [U, A], "instruction": None, "output": None, "chosen": None, "rejected": None}, [U, A]),
        ({"messages": None, "instruction": "q", "output": "a", "history": '[["q", "a"]]'}, [U, A, U, A]),
        ({"prompt": json.dumps([U]), "completion": json.dumps(A)}, [U, A]),
        ({"prompt": "q", "completion": "a"}, [U, A]),
        ({"prompt": "q", "response": "a"}, [U, A]),
        ({"prompt": [U], "completion": [A]}, [U, A]),
        (
            {
                "conversations": [
                    {"from": "human", "value": "q"},
                    {"from": "function_call", "value": json.dumps({"name": "f", "arguments": {"x": 1}})},
                    {"from": "observation", "value": "r"},
                    {"from": "gpt", "value": "a"},
                ]
            },
            [U, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "r"}, A],
        ),
        (
            {
                "messages": [
                    U,
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}],
                    },
                ]
            },
            [U, {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "1"}]}],
        ),
    ],
)
def test_kinds_of_records(value, messages):
    conversation = parse(value)
    assert isinstance(conversation, Conversation)
    assert conversation.messages == messages
    assert conversation.where == "d.jsonl:3"


def test_tools_as_list_and_as_json_text():
    tool = {"name": "f", "parameters": {}}
    wrapped = {"type": "function", "function": tool}
    for tools in ([tool], [wrapped], json.dumps([tool]), json.dumps([wrapped])):
        assert parse({"messages": [U, A], "tools": tools}).tools == [wrapped]
    for tools in (None, "", [], "[]"):
        assert parse({"messages": [U, A], "tools": tools}).tools is None


@pytest.mark.parametrize(
    ("names", "messages"),
    [
        ({"question": "q", "answer": "a", "id": 7}, [U, A]),
        ({"instruction": "q", "response": "a"}, [U, A]),
        ({"instruction": "q", "input": "", "response": "a"}, [U, A]),
        ({"input": "q", "output": "a"}, [U, A]),
    ],
)
def test_names_of_other_data_sets_are_recognized(names, messages):
    conversation = parse(names)
    assert isinstance(conversation, Conversation)
    assert conversation.messages == messages


def test_a_record_that_is_only_content_is_a_document():
    assert parse({"content": "blue", "url": "x"}) == "blue"


@pytest.mark.parametrize(
    "value",
    [{"question": "q", "answer": "a", "context": "c"}, {"input": "q", "output": "a", "question": "r"}],
)
def test_fields_that_can_be_read_in_several_ways_are_refused(value):
    with pytest.raises(DataError, match="unknown record with the keys"):
        parse(value)


def test_text_is_a_document():
    assert parse({"text": "blue", "url": "x"}) == "blue"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"messages": [U]}, "no assistant turn"),
        ({"messages": []}, "no assistant turn"),
        ({"conversations": [{"from": "human", "value": "q"}], "chosen": {}, "rejected": {}}, "preference pair"),
        ({"question": "q"}, "unknown record with the keys question"),
        ({"text": None, "id": 7}, "unknown record with the keys id"),
        ({}, "unknown record with the keys none"),
        ({"messages": "[{'role': 'user'}]"}, "messages begins like a list but is not JSON"),
        ({"messages": "[{'role': 'user'}]"}, "A Python literal is not JSON"),
        ({"messages": [U, {**A, "train": "no"}]}, "turn 2 has train 'no'. Expected 0 or 1, or false or true."),
        ({"messages": [U, {**A, "weight": 0.5}]}, "turn 2 has weight 0.5"),
        ({"messages": [U, {**A, "reasoning": ["t"]}]}, "turn 2's reasoning must be text, got list"),
        ({"messages": ["q"]}, "turn 1 must be an object, got str"),
        ({"messages": [U, {"role": "robot", "content": "a"}]}, "turn 2 has the unknown role 'robot'"),
        ({"messages": [U, {"role": ["x"], "content": "a"}]}, "turn 2 has the unknown role"),
        ({"messages": [U, {"role": "assistant"}]}, "the assistant turn's content must be text, got NoneType"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, A]},
            "content part of type 'image_url'. Language",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "image": "x"}]}, A]}, "the keys type, image"),
        (
            {"messages": [{"role": "user", "content": [{"type": "reasoning", "value": "t"}]}, A]},
            "a content part outside of an assistant turn of type 'reasoning'",
        ),
        ({"messages": [U, {**A, "content": [{"type": "tool_call", "value": "f("}]}]}, "a tool_call part is not JSON"),
        ({"messages": [U, {"role": "assistant", "content": "\ud800"}]}, "lone surrogate U+D800"),
        ({"text": "\udfff"}, "lone surrogate"),
        ({"instruction": 1, "output": "a"}, "instruction must be text, got int"),
        ({"instruction": "q", "output": ["a"]}, "content part of type 'str'"),
        ({"instruction": "q", "output": "a", "history": ["q"]}, "history must be"),
        ({"messages": [U, A], "tools": "[{"}, "tools is not JSON"),
        ({"messages": [U, A], "tools": {"f": 1}}, "tools must be a list"),
        ({"messages": [U, A], "tools": [{"f": 1}]}, "a tool must be an object with a name"),
        ({"conversations": [{"from": "function_call", "value": "f(1)"}]}, "the function_call turn is not JSON"),
        ({"messages": [U, {**A, "tool_calls": [{"name": 1}]}]}, "a tool call must be an object with a name"),
    ],
)
def test_bad_records_are_refused_with_their_line(value, message):
    with pytest.raises(DataError) as caught:
        parse(value)
    assert str(caught.value).startswith("d.jsonl:3: ")
    assert message in str(caught.value)
