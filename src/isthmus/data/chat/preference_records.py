"""Parses records to preference pairs, or to labelled answers; their keys determine the format.

================================  ====================================================================
before the answers                ``chosen`` and ``rejected``
================================  ====================================================================
``prompt``: text or messages      text, a turn, or turns; the turns may begin with those of the prompt
``messages``, ``conversations``   text, a turn, or turns (LLaMA-Factory)
``instruction``, ``input``        text, a turn, or turns
nothing                           whole conversations: their common turns are the prompt
nothing                           whole conversations as text: ``Human:`` and ``Assistant:`` (HH-RLHF)
================================  ====================================================================

A labelled answer is a chat with ``label``, or one of the two answers of a pair.
"""

from __future__ import annotations

import contextlib
import math
import re
from typing import Any

from isthmus.data.chat.chat_records import (
    Conversation,
    LabelledRecord,
    PreferenceRecord,
    columns_hint,
    label_of,
    parse_record,
    present,
    question,
    turns_of_record,
    with_system,
)
from isthmus.data.chat.message_normalization import Message, message, normal_tools, side, turns
from isthmus.data.readers.chunks import Record
from isthmus.errors import DataError

_SPEAKER = re.compile(r"(?:\A|\n\n)(Human|Assistant):")


def parse_preference(record: Record) -> PreferenceRecord:
    """Raises DataError for a record without a pair, prompt or assistant turn, or with a wrong type."""
    value, where = present(record), record.where
    if "chosen" not in value or "rejected" not in value:
        keys = ", ".join(sorted(map(str, value))) or "none"
        hint = columns_hint(record, "preference")
        raise DataError(f"{where}: not a preference pair: expected the keys chosen and rejected, got {keys}; {hint}")
    chosen, rejected = (_answer(value[name], name, where) for name in ("chosen", "rejected"))
    prompt = _prompt(value, where)
    shared = _shared(chosen, rejected)
    if (
        prompt is not None
        and len(chosen) > 1
        and any(_same(prompt, conversation) for conversation in (chosen, rejected))
    ):
        prompt = None  # messages repeat one of the two conversations, as in UltraFeedback
    # The answers may begin with the prompt, perhaps with its system turn or the first turns of the answer.
    if prompt is None or (
        shared and any(_same(prompt, part) for part in (shared[: len(prompt)], shared[-len(prompt) :]))
    ):
        prompt = shared
        chosen, rejected = chosen[len(shared) :], rejected[len(shared) :]
    prompt = with_system(prompt, value, where)
    if not any(turn["role"] == "user" for turn in prompt):
        raise DataError(f"{where}: no user turn before chosen and rejected. Expected prompt, messages or instruction.")
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer or answer[0]["role"] != "assistant":
            got = answer[0]["role"] if answer else "nothing"
            raise DataError(f"{where}: {name} must continue the prompt with an assistant turn, got {got}.")
    tools, margin = normal_tools(value.get("tools"), where), _margin(value.get("margin", 0), where)
    return PreferenceRecord(prompt, chosen, rejected, tools, where, margin)


def parse_labelled(record: Record) -> LabelledRecord:
    """A chat with ``label``, whose answer is the turns after the last user turn; or both answers of a pair.

    Raises DataError for a record without label or answer, or with a wrong type.
    """
    value, where = present(record), record.where
    if "chosen" in value and "rejected" in value:
        pair = parse_preference(record)
        return LabelledRecord(pair.prompt, [(pair.chosen, True), (pair.rejected, False)], pair.tools, where)
    label = label_of(value)
    if label is None:
        tag = value.get("label", value.get("kto_tag"))
        got = "nothing" if tag is None else repr(tag)[:60]
        raise DataError(f"{where}: label must be true (desirable) or false, got {got}.")
    chat = parse_record(record)
    if not isinstance(chat, Conversation):
        raise DataError(f"{where}: expected a chat or prompt and completion beside label, got plain text.")
    turns = chat.messages
    start = max((number + 1 for number, turn in enumerate(turns) if turn["role"] == "user"), default=0)
    if not 0 < start < len(turns):
        raise DataError(f"{where}: expected a user turn and then the labelled answer, got {turns[-1]['role']} last.")
    return LabelledRecord(turns[:start], [(turns[start:], label)], chat.tools, where)


def _margin(value: Any, where: str) -> float:
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, bool) and math.isfinite(number := float(value)):
            return number
    raise DataError(
        f"{where}: margin must be a number, got {value!r:.60}. data.columns names another field: margin: NAME."
    )


def _answer(value: Any, name: str, where: str) -> list[Message]:
    return _dialog(value, where) or side(value, "assistant", name, where)


def _prompt(value: dict[str, Any], where: str) -> list[Message] | None:
    if (listed := turns_of_record(value, where)) is not None:
        return turns(listed, where)
    if "instruction" in value:
        return question(value, where)
    for name in ("prompt", "query"):
        if name in value:
            return _dialog(value[name], where) or side(value[name], "user", name, where)
    return None


def _dialog(value: Any, where: str) -> list[Message]:
    """The turns of a dialog in one text, as in HH-RLHF; empty for anything else."""
    if not (isinstance(value, str) and value.lstrip().startswith("Human:")):
        return []
    parts = _SPEAKER.split(value.strip())[1:]
    messages = [
        message("user" if speaker == "Human" else "assistant", words.strip(), where)
        for speaker, words in zip(parts[::2], parts[1::2], strict=True)
    ]
    return messages if messages[-1]["content"] else messages[:-1]  # "Assistant:" at the end is a generation prompt


def _shared(chosen: list[Message], rejected: list[Message]) -> list[Message]:
    """The common first turns, up to the assistant turn where they differ; at least one turn of each remains."""
    length = 0
    for k, pair in enumerate(zip(chosen, rejected, strict=False)):
        if all(turn["role"] == "assistant" for turn in pair):
            length = k
        if not _same([pair[0]], [pair[1]]):
            break
    return chosen[:length]


def _same(some: list[Message], others: list[Message]) -> bool:
    return len(some) == len(others) and all(
        (a["role"], a["content"].strip(), a.get("tool_calls")) == (b["role"], b["content"].strip(), b.get("tool_calls"))
        for a, b in zip(some, others, strict=True)
    )
