"""The chat templates that stand in when a tokenizer brings none.

ChatML is taken only where its two marks are tokens of the vocabulary; otherwise turns are announced in plain text and
the assistant's end with the end-of-sequence token, the one stop mark that every model has already learned.
Tools need no place in either: see ``isthmus.data.chat.template_capabilities``.
"""

from __future__ import annotations

from collections.abc import Container

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


def default_template(vocabulary: Container[str], *, adds_bos: bool) -> tuple[str, str]:
    """The template for a tokenizer that has none, and its name (``"chatml"`` or ``"plain"``) to be told to the user.

    Args:
        vocabulary: every token, special ones included.
        adds_bos: whether the tokenizer itself puts its first token before a text; the template then does so too.
    """
    name, template = ("chatml", CHATML) if all(mark in vocabulary for mark in CHATML_MARKS) else ("plain", _PLAIN)
    return name, ("{{- bos_token -}}" if adds_bos else "") + template
