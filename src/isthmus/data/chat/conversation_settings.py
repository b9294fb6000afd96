"""The settings of a run that change conversations before they are rendered: system prompt and reasoning."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from isthmus.data.chat.message_normalization import Message

Reasoning = Literal["keep", "last", "drop"]
_THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Settings of the section ``chat``, with their names and defaults."""

    system: str | None = None
    override_system: bool = False
    reasoning: Reasoning = "keep"
    split_turns: bool = True

    def as_record(self) -> dict[str, Any]:
        """The settings, as fingerprints have them: of runs before ``split_turns``, which behaved as if it were true."""
        record = asdict(self)
        if self.split_turns:
            del record["split_turns"]
        return record

    def applied(self, messages: list[Message]) -> list[Message]:
        """The turns with these settings; ``messages`` itself is not changed."""
        if self.system is not None:
            has_system = any(message["role"] == "system" for message in messages)
            if self.override_system:
                messages = [message for message in messages if message["role"] != "system"]
            if self.override_system or not has_system:
                messages = [{"role": "system", "content": self.system}, *messages]
        if self.reasoning == "keep":
            return messages
        last_user = max((k for k, message in enumerate(messages) if message["role"] == "user"), default=-1)
        kept_from = last_user if self.reasoning == "last" else len(messages)
        return [message if k >= kept_from else _without_reasoning(message) for k, message in enumerate(messages)]


def _without_reasoning(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    stripped = {key: value for key, value in message.items() if key != "reasoning_content"}
    thought = _THOUGHT.match(stripped["content"])
    return stripped if thought is None else stripped | {"content": stripped["content"][thought.end() :]}


UNCHANGED = ChatSettings()
"""The settings that change nothing."""
