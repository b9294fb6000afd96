"""Probes what a chat template renders, and rewrites conversations accordingly.

Many templates silently ignore tools, tool calls, system turns or reasoning. Ignored content is moved into the text of a
turn; else the model would train on answers to content that it never saw. Tokenizers without a template get ChatML if
both of its marks are tokens of the vocabulary; else roles are plain text and an assistant turn ends with EOS.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from isthmus.data.chat.message_normalization import Message, Tools
from isthmus.errors import DataError

Render = Callable[[list[Message], Tools], str]
CHATML_MARKS = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
_PLAIN = (
    "{%- for message in messages -%}"
    "{%- if not loop.first -%}{{- '\\n\\n' -}}{%- endif -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{- '### Assistant:\\n' + message['content'] + eos_token -}}"
    "{%- elif message['role'] == 'system' -%}{{- message['content'] -}}"
    "{%- elif message['role'] == 'tool' -%}{{- '### Tool:\\n' + message['content'] -}}"
    "{%- else -%}{{- '### User:\\n' + message['content'] -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '\\n\\n### Assistant:\\n' -}}{%- endif -%}"
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "probetool",
        "description": "probe",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "x"}},
            "required": ["x"],
        },
    },
}
_CALL_ID = "call00000"


@dataclass(frozen=True, slots=True)
class TemplateCapabilities:
    """What a template renders; ``calls``: tool calls and their responses."""

    system: bool
    tools: bool
    calls: bool
    reasoning: str | None
    """The key of a turn that is rendered as reasoning; ``content`` without another, None if removed there."""

    @classmethod
    def probe(cls, render: Render) -> TemplateCapabilities:
        user: Message = {"role": "user", "content": "probeuser"}
        call = {"type": "function", "id": _CALL_ID, "function": {"name": "probetool", "arguments": {"x": "probevalue"}}}
        called = [
            user,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "probeanswer", "name": "probetool", "tool_call_id": _CALL_ID},
            {"role": "assistant", "content": "probeend"},
        ]
        system = {"role": "system", "content": "probesystem"}
        return cls(
            system=_renders(render, [system, user], None, "probesystem"),
            tools=_renders(render, [user], [_TOOL], "probetool"),
            calls=_renders(render, called, None, "probetool", "probevalue", "probeanswer", "probeend"),
            reasoning=_reasoning_key(render, user),
        )


def _reasoning_key(render: Render, user: Message) -> str | None:
    thought, end = "probethought", "probeend"
    for key in ("reasoning_content", "reasoning", "thinking"):
        if _renders(render, [user, {"role": "assistant", "content": end, key: thought}], None, thought, end):
            return key
    folded = {"role": "assistant", "content": _folded(thought, end)}
    return "content" if _renders(render, [user, folded], None, thought, end) else None


def _renders(render: Render, messages: list[Message], tools: Tools, *words: str) -> bool:
    try:
        text = render(messages, tools)
    except DataError:
        return False
    return all(word in text for word in words)


def adapt(messages: list[Message], tools: Tools, capabilities: TemplateCapabilities) -> tuple[list[Message], Tools]:
    """Move content that the template ignores into the text of its turns; DataError for reasoning removed there too."""
    messages = [_with_reasoning(dict(message), capabilities.reasoning) for message in messages]
    if tools and not capabilities.tools:
        messages, tools = _with_system(messages, _tools_text(tools)), None
    if capabilities.calls:
        _number_calls(messages)
    else:
        messages = _calls_as_text(messages)
    if not capabilities.system:
        messages = _without_system(messages)
    return messages, tools


def _with_reasoning(message: Message, key: str | None) -> Message:
    reasoning = message.pop("reasoning_content", None)
    if reasoning is None:
        return message
    if key is None:
        raise DataError(
            "this record has reasoning, and the chat template removes it from every answer. Use a template that "
            "renders it (chat.template), or train without it (chat.reasoning=drop)."
        )
    shown = _folded(reasoning, message["content"]) if key == "content" else reasoning
    return {**message, key: shown}


def _folded(reasoning: str, content: str) -> str:
    return f"<think>\n{reasoning.strip()}\n</think>\n\n{content}"


def _tools_text(tools: Sequence[dict[str, Any]]) -> str:
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        "You may call these tools:\n<tools>\n" + lines + "\n</tools>\n"
        'To call one, answer with\n<tool_call>\n{"name": <its name>, "arguments": <an object>}\n</tool_call>'
    )


def _with_system(messages: list[Message], text: str) -> list[Message]:
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _calls_as_text(messages: list[Message]) -> list[Message]:
    result: list[Message] = []
    for message in messages:
        if calls := message.pop("tool_calls", None):
            texts = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
            blocks = [f"<tool_call>\n{text}\n</tool_call>" for text in texts]
            message["content"] = "\n".join([message["content"], *blocks] if message["content"] else blocks)
        elif message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            message = {"role": "user", "content": text}
            if result and result[-1]["role"] == "user":  # some templates require alternating turns
                result[-1] = {**result[-1], "content": f"{result[-1]['content']}\n{text}"}
                continue
        elif message["role"] == "user" and result and result[-1]["content"].endswith("</tool_response>"):
            result[-1] = {**result[-1], "content": f"{result[-1]['content']}\n{message['content']}"}
            continue
        result.append(message)
    return result


def _without_system(messages: list[Message]) -> list[Message]:
    """Joins system turns to the next user turn."""
    result: list[Message] = []
    pending: list[str] = []
    for message in messages:
        if message["role"] == "system":
            pending.append(message["content"])
        elif pending and message["role"] == "user":
            result.append({**message, "content": "\n\n".join([*pending, message["content"]])})
            pending = []
        else:
            if pending:  # the assistant has the first turn; the system text precedes it
                result.append({"role": "user", "content": "\n\n".join(pending)})
                pending = []
            result.append(message)
    return result


def _number_calls(messages: list[Message]) -> None:
    """Add the ids that some templates require to tool calls and responses without one."""
    number, waiting = 0, []
    for message in messages:
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [
                call if "id" in call else {**call, "id": f"call{number + k:05d}"} for k, call in enumerate(calls)
            ]
            number += len(calls)
            waiting = [(call["id"], call["function"]["name"]) for call in message["tool_calls"]]
        elif message["role"] == "tool" and waiting:
            call_id, name = waiting.pop(0)
            message.setdefault("tool_call_id", call_id)
            message.setdefault("name", name)


def default_template(vocabulary: Container[str], *, adds_bos: bool) -> tuple[Literal["chatml", "plain"], str]:
    """The name of the template and its text; with ``adds_bos`` the template starts with BOS."""
    has_marks = all(mark in vocabulary for mark in CHATML_MARKS)
    bos = "{{- bos_token -}}" if adds_bos else ""
    return ("chatml", bos + CHATML) if has_marks else ("plain", bos + _PLAIN)
