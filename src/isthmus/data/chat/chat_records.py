"""Parses records to conversations; their keys determine the format.

===========================  ==========================================================
format                       keys
===========================  ==========================================================
messages (OpenAI)            ``messages`` of ``role``/``content``; ``tools``, ``tool_calls``
sharegpt                     ``conversations`` of ``from``/``value``; ``system``, ``tools``
alpaca                       ``instruction``, ``output``; ``input``, ``system``, ``history``
prompt and completion        ``prompt``, ``completion`` (or ``response``): text or messages; ``history``
query and response           ``query``, ``response``; ``history``, ``system`` (ms-swift)
other names                  ``question``/``answer``, ``instruction``/``response``, ``input``/``output``
text                         ``text``, or ``content`` alone
===========================  ==========================================================

Preference pairs and labelled answers: ``isthmus.data.chat.preference_records``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from isthmus.data.chat.field_guesses import columns_setting, guessed_columns
from isthmus.data.chat.message_normalization import (
    Message,
    check_characters,
    listed,
    message,
    normal_tools,
    optional_text,
    side,
    text,
    turns,
)
from isthmus.data.readers.chunks import Record
from isthmus.errors import DataError

Kind = Literal["text", "chat", "preference", "unpaired", "prompt"]
_FORMATS = (
    "messages, conversations (from/value), instruction+output, prompt+completion, query+response, question+answer, "
    "instruction+response, input+output, text"
)
_ALIASES: tuple[dict[str, str], ...] = (
    {"question": "prompt", "answer": "completion"},
    {"instruction": "instruction", "response": "output"},
    {"instruction": "instruction", "input": "input", "response": "output"},
    {"input": "prompt", "output": "completion"},
    {"question": "prompt", "response_chosen": "chosen", "response_rejected": "rejected"},
    {"question": "prompt", "chosen": "chosen", "rejected": "rejected"},
    {"content": "text"},
)
"""Names of other data sets and what they mean."""
_TEXT_FIELDS = {name for names in _ALIASES for pair in names.items() for name in pair} | {
    *("messages", "conversations", "query", "context")
}
"""Fields with text to learn: a record that has more of them than an alias can be read in several ways."""
_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns with the keys of chat templates (``role``, ``content``, ``tool_calls``)."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    where: str
    """``file:line`` of the record."""


@dataclass(frozen=True, slots=True)
class PreferenceRecord:
    prompt: list[Message]
    chosen: list[Message]
    """Turns after the prompt, with at least one assistant turn."""
    rejected: list[Message]
    tools: list[dict[str, Any]] | None
    where: str
    margin: float = 0.0
    """Reward margin of the chosen answer."""


@dataclass(frozen=True, slots=True)
class LabelledRecord:
    prompt: list[Message]
    answers: list[tuple[list[Message], bool]]
    """Turns after the prompt, and whether they are desirable; both answers of a preference pair."""
    tools: list[dict[str, Any]] | None
    where: str


def kinds_of(record: Record) -> list[Kind]:
    """The possible kinds of a record, the most likely first; empty for an unknown record."""
    value = present(record)
    kinds: list[Kind] = ["preference"] if "chosen" in value and "rejected" in value else []
    pairs = (("instruction", "output"), ("prompt", "completion"), ("prompt", "response"), ("query", "response"))
    if any(first in value and second in value for first, second in pairs):
        kinds.append("chat")
    elif any(value.get(name) for name in ("messages", "conversations")):
        kinds.append("chat")
    if isinstance(value.get("text"), str):
        kinds.append("text")
    if "chat" in kinds and "preference" not in kinds and label_of(value) is not None:
        return ["unpaired", *kinds]
    labelled = "chat" in kinds and ("label" in value or "kto_tag" in value)
    return [*kinds, "unpaired"] if labelled or "preference" in kinds else kinds


def label_of(value: dict[str, Any]) -> bool | None:
    """Whether the answer of a record is desirable: ``label``, or LLaMA-Factory's ``kto_tag``; None without one."""
    return _LABELS.get(str(value.get("label", value.get("kto_tag"))).lower())


def check_desirable(record: Record) -> None:
    """Refuse a record whose answer must not be learned as a right one."""
    value, where = present(record), record.where
    if label_of(value) is False:
        raise DataError(
            f"{where}: label false marks an answer that is not desirable, and this recipe learns all answers as right "
            "ones. Train with isthmus kto. data.on_error=skip leaves these records out and counts them; remove the "
            "field if it means something else."
        )
    if not value.keys() >= {"chosen", "rejected"}:
        return
    listed_turns = turns_of_record(value, where)
    last = turns(listed_turns, where)[-1:] if listed_turns else []
    chosen, rejected = (side(value[name], "assistant", name, where)[-1:] for name in ("chosen", "rejected"))
    if last and last != chosen and last == rejected:
        raise DataError(f"{where}: its turns end with the rejected answer. Train with isthmus dpo on both answers.")


def parse_document(record: Record) -> str:
    """The ``text`` of a record, which may have other keys."""
    value, where = present(record), record.where
    if not isinstance(value.get("text"), str):
        raise _unknown(record, "text")
    return check_characters(value["text"], where)


def parse_record(record: Record) -> Conversation | str:
    """Parse a record that is not a preference pair; ``text`` is used only without turns.

    Raises DataError for an unknown format, a wrong type, or a conversation without an assistant turn.
    """
    value, where = present(record), record.where
    is_pair = "chosen" in value and "rejected" in value
    if is_pair and not {"chat", "text"} & {*kinds_of(record)}:
        raise _preference_error(where)
    if (listed_turns := turns_of_record(value, where)) is not None:
        messages = turns(listed_turns, where)
    elif "instruction" in value and "output" in value:
        messages = [*question(value, where), message("assistant", value["output"], where)]
    elif "prompt" in value and ("completion" in value or "response" in value):
        answer = value["completion"] if "completion" in value else value["response"]
        asked = side(value["prompt"], "user", "prompt", where)
        messages = [*_history(value, where), *asked, *side(answer, "assistant", "completion", where)]
    elif "query" in value and "response" in value:
        asked = [message("user", value["query"], where)]
        messages = [*_history(value, where), *asked, message("assistant", value["response"], where)]
    elif isinstance(value.get("text"), str):
        return parse_document(record)
    else:
        raise _unknown(record, "chat")
    messages = with_system(messages, value, where)
    if is_pair and messages[-1]["role"] != "assistant":
        raise _preference_error(where)
    if not any(turn["role"] == "assistant" for turn in messages):
        raise DataError(f"{where}: no assistant turn, so this record has no loss tokens.")
    return Conversation(messages, normal_tools(value.get("tools"), where), where)


def parse_chat(record: Record) -> Conversation:
    """Parse a chat to learn all of its answers from.

    Raises DataError as :func:`parse_record` and :func:`check_desirable`.
    """
    check_desirable(record)
    conversation = parse_record(record)
    assert isinstance(conversation, Conversation)  # a text is refused before, as a record of another kind
    return conversation


def _unknown(record: Record, kind: Kind) -> DataError:
    keys, hint = ", ".join(sorted(map(str, present(record)))) or "none", columns_hint(record, kind)
    return DataError(f"{record.where}: unknown record with the keys {keys}. Expected one of: {_FORMATS}; {hint}")


def columns_hint(record: Record, kind: Kind) -> str:
    """How ``data.columns`` maps the fields of a record of unknown format, if that can be guessed."""
    value = {str(name): cell for name, cell in record.value.items() if cell is not None}
    columns = guessed_columns(value, kind)
    renamed = {known: value[name] for known, name in columns.items()}
    if kind not in kinds_of(Record(renamed, record.where)):
        return "data.columns maps other names."
    return f"data.columns maps other names, for this record perhaps {columns_setting(columns)}."


def _preference_error(where: str) -> DataError:
    return DataError(f"{where}: a preference pair (chosen/rejected) is not a chat record. Expected one of: {_FORMATS}.")


def present(record: Record) -> dict[str, Any]:
    """The fields that are not null, because rows of a table have the fields of all its rows, with their usual names."""
    value = {name: cell for name, cell in record.value.items() if cell is not None}
    fields = _TEXT_FIELDS.intersection(value)
    for names in _ALIASES:
        if fields == names.keys() and all(isinstance(value[name], str) for name in fields):
            return {names.get(name, name): cell for name, cell in value.items()}
    return value


def turns_of_record(value: dict[str, Any], where: str) -> list[Any] | None:
    """The turns under ``messages`` or ``conversations``, if any."""
    for name in ("messages", "conversations"):
        if (entries := listed(value.get(name), name, where)) is not None:
            return entries
    return None


def question(value: dict[str, Any], where: str) -> list[Message]:
    """The turns before the answer in an Alpaca record."""
    asked = text(value["instruction"], "instruction", where)
    extra = optional_text(value, "input", where)
    asked = f"{asked}\n{extra}" if asked and extra else asked or extra
    return [*_history(value, where), message("user", asked, where)]


def _history(value: dict[str, Any], where: str) -> list[Message]:
    """The earlier turns of a record: pairs of question and answer."""
    messages: list[Message] = []
    for pair in listed(value.get("history"), "history", where) or []:
        if not (isinstance(pair, list) and len(pair) == 2):
            raise DataError(f"{where}: history must be a list of [question, answer] pairs, got {pair!r:.60}.")
        messages += [message("user", pair[0], where), message("assistant", pair[1], where)]
    return messages


def with_system(messages: list[Message], value: dict[str, Any], where: str) -> list[Message]:
    """The turns after the record's ``system`` text, unless they have a system turn."""
    system = optional_text(value, "system", where)
    if not system or any(turn["role"] == "system" for turn in messages):
        return messages
    return [{"role": "system", "content": check_characters(system, where)}, *messages]
