"""Parses records to prompts with the columns that rewards read.

================================  =====================================================================
prompt                            keys
================================  =====================================================================
TRL, verl, slime                  ``prompt``: text, or messages that end with the user's
OpenAI, sharegpt                  ``messages``, ``conversations``
GSM8K, MATH, ms-swift             ``question``, ``problem``, ``query``: text
================================  =====================================================================

All other fields are columns, under their names. ``ground_truth`` of verl's ``reward_model`` is a column as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from isthmus.data.chat.chat_records import with_system
from isthmus.data.chat.message_normalization import (
    Message,
    check_characters,
    message,
    normal_tools,
    turns,
    turns_in_text,
)
from isthmus.data.readers.chunks import Record
from isthmus.errors import DataError

PROMPT = "prompt"
"""Column of the prompt, whatever its name in the record."""
GROUND_TRUTH = "ground_truth"
"""Column of the right answer; verl nests it in ``reward_model``."""
_PROMPTS = ("prompt", "messages", "conversations", "question", "problem", "query")
_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Further arguments of TRL's reward functions, which no column can have the name of."""


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """A prompt to answer, and what its rewards need."""

    prompt: str | list[Message]
    """Text to continue, or messages whose last one is of the user or a tool."""
    tools: list[dict[str, Any]] | None
    columns: dict[str, Any]
    """The other fields of the record."""
    where: str
    """``file:line`` of the record."""


def parse_prompt(record: Record) -> PromptRecord:
    """Parse a record of a prompt; a ``system`` text becomes a message before it.

    Raises DataError for a record without a prompt, with an empty one, or whose last message is the assistant's, and for
    a field with the name of an argument of reward functions.
    """
    value, where = record.value, record.where
    name = next((name for name in _PROMPTS if value.get(name) is not None), None)
    if name is None:
        keys = ", ".join(sorted(map(str, value))) or "none"
        raise DataError(
            f"{where}: no prompt in a record with the keys {keys}. Expected one of: {', '.join(_PROMPTS)}; "
            "data.columns maps other names, such as prompt: input."
        )
    columns = {key: cell for key, cell in value.items() if key not in (name, "tools", "system")}
    if reserved := next((key for key in _ARGUMENTS if key in columns), None):
        raise DataError(f"{where}: the field {reserved} has the name of an argument of reward functions. Rename it.")
    graded = columns.get("reward_model")
    if isinstance(graded, dict) and graded.get(GROUND_TRUTH) is not None:
        columns.setdefault(GROUND_TRUTH, graded[GROUND_TRUTH])
    return PromptRecord(_prompt(value, name, where), normal_tools(value.get("tools"), where), columns, where)


def _prompt(value: dict[str, Any], name: str, where: str) -> str | list[Message]:
    content = turns_in_text(value[name])
    if isinstance(content, str) and content.strip():
        if not value.get("system"):
            return check_characters(content, where)
        return with_system([message("user", content, where)], value, where)
    if not content or not isinstance(content, list):
        got = "is empty" if content in ("", []) or isinstance(content, str) else f"is {content!r:.60}"
        raise DataError(f"{where}: {name} {got}. Expected a text or messages.")
    messages = with_system(turns(content, where), value, where)
    if (role := messages[-1]["role"]) not in ("user", "tool"):
        raise DataError(
            f"{where}: the last message of {name} is of the {role}. Expected the user's, which the model answers."
        )
    return messages
