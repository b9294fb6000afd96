"""Records to conversations: the kinds of chat data found in the field, told apart by their keys.

===========================  ==========================================================
kind                         keys
===========================  ==========================================================
messages (OpenAI)            ``messages`` of ``role``/``content``; ``tools``, ``tool_calls``
sharegpt                     ``conversations`` of ``from``/``value``; ``system``, ``tools``
alpaca                       ``instruction``, ``output``; ``input``, ``system``, ``history``
prompt and completion        ``prompt``, ``completion`` (or ``response``): text or messages
text                         ``text``
===========================  ==========================================================

Pairs of answers are in ``isthmus.data.chat.preference_records``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from isthmus.data.chat.message_normalization import Message as Message
from isthmus.data.chat.message_normalization import listed, message, optional_text, side, sound, text, turns
from isthmus.data.chat.tool_calls import normal_tools
from isthmus.data.readers.chunks import Record
from isthmus.errors import DataError

Kind = Literal["text", "chat", "preference"]
RECIPES: dict[Kind, str] = {"text": "pretrain", "chat": "sft", "preference": "dpo"}
"""What learns from each kind."""
FIELDS = (
    "text", "messages", "conversations", "instruction", "input", "output", "history", "system", "tools",
    "prompt", "completion", "response", "chosen", "rejected",
)  # fmt: skip
"""Every key of a record that is known here."""
_KINDS = (
    "messages, conversations (from/value), instruction+output, prompt+completion, text"  # what an error message offers
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in the order they were spoken, in the words of chat templates (``role``, ``content``, ``tool_calls``)."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    where: str
    """``file:line`` of the record it came from."""


@dataclass(frozen=True, slots=True)
class Document:
    """Plain text to be learned as it stands."""

    text: str
    where: str


@dataclass(frozen=True, slots=True)
class PreferenceRecord:
    """Two answers to one conversation, the better one and the worse one."""

    prompt: list[Message]
    """Turns before the answers."""
    chosen: list[Message]
    """Turns that follow the prompt; at least one is the assistant's."""
    rejected: list[Message]
    """Likewise."""
    tools: list[dict[str, Any]] | None
    where: str


def kinds_of(record: Record) -> list[Kind]:
    """What a record could be, by its keys alone, the likeliest first; nothing when it is no known kind."""
    value = present(record)
    found: list[Kind] = ["preference"] if "chosen" in value and "rejected" in value else []
    pairs = (("instruction", "output"), ("prompt", "completion"), ("prompt", "response"))
    if any(first in value and second in value for first, second in pairs):
        found.append("chat")
    elif any(value.get(name) for name in ("messages", "conversations")):
        found.append("chat")
    return [*found, "text"] if isinstance(value.get("text"), str) else found


def parse_document(record: Record) -> Document:
    """The text of a record, whatever else it has.

    Raises:
        DataError: it has none, or one that is no text.
    """
    value, where = present(record), record.where
    if not isinstance(value.get("text"), str):
        raise _unknown(value, where)
    return Document(sound(value["text"], where), where)


def parse_record(record: Record) -> Conversation | Document:
    """Bring a record that is no pair of answers into one form; its text is taken only where it has no turns.

    Raises:
        DataError: no known kind, a field of the wrong type, a conversation without an assistant turn, or one whose
            answers are apart, as chosen and rejected.
    """
    value, where = present(record), record.where
    is_pair = "chosen" in value and "rejected" in value
    if is_pair and kinds_of(record) == ["preference"]:
        raise _apart(where)
    if (given := given_turns(value, where)) is not None:
        messages = turns(given, where)
    elif "instruction" in value and "output" in value:
        messages = [*question(value, where), message("assistant", value["output"], where)]
    elif "prompt" in value and ("completion" in value or "response" in value):
        answer = value["completion"] if "completion" in value else value["response"]
        messages = side(value["prompt"], "user", "prompt", where) + side(answer, "assistant", "completion", where)
    elif isinstance(value.get("text"), str):
        return parse_document(record)
    else:
        raise _unknown(value, where)
    messages = with_system(messages, value, where)
    if is_pair and messages[-1]["role"] != "assistant":
        raise _apart(where)
    if not any(turn["role"] == "assistant" for turn in messages):
        raise DataError(f"{where}: no assistant turn, so there is nothing to learn from this record.")
    return Conversation(messages, normal_tools(value.get("tools"), where), where)


def _unknown(value: dict[str, Any], where: str) -> DataError:
    keys = ", ".join(sorted(map(str, value))) or "none"
    told = f"unknown kind of record with the keys {keys}. Wanted one of: {_KINDS}; data.columns maps other names."
    return DataError(f"{where}: {told}")


def _apart(where: str) -> DataError:
    return DataError(f"{where}: a preference pair (chosen/rejected) is no chat record. Wanted one of: {_KINDS}.")


def present(record: Record) -> dict[str, Any]:
    """The fields of a record that are not null: rows of a table have all fields of all kinds that are in it."""
    return {name: cell for name, cell in record.value.items() if cell is not None}


def given_turns(value: dict[str, Any], where: str) -> list[Any] | None:
    """The turns of a record that has ``messages`` or ``conversations``; None for others."""
    for name in ("messages", "conversations"):
        if (found := listed(value.get(name), name, where)) is not None:
            return found
    return None


def question(value: dict[str, Any], where: str) -> list[Message]:
    """What comes before the answer in an Alpaca record."""
    messages: list[Message] = []
    for pair in listed(value.get("history"), "history", where) or []:
        if not (isinstance(pair, list) and len(pair) == 2):
            raise DataError(f"{where}: history must be a list of [question, answer] pairs, got {pair!r:.60}.")
        messages += [message("user", pair[0], where), message("assistant", pair[1], where)]
    asked = text(value["instruction"], "instruction", where)
    extra = optional_text(value, "input", where)
    asked = f"{asked}\n{extra}" if asked and extra else asked or extra
    return [*messages, message("user", asked, where)]


def with_system(messages: list[Message], value: dict[str, Any], where: str) -> list[Message]:
    """The turns after the record's own ``system`` text, unless a system turn is among them."""
    system = optional_text(value, "system", where)
    if not system or any(turn["role"] == "system" for turn in messages):
        return messages
    return [{"role": "system", "content": sound(system, where)}, *messages]
