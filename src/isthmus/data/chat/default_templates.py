"""Default chat templates for tokenizers without one.

ChatML is used only if its two marks are tokens of the vocabulary; otherwise roles are plain text and an assistant turn
ends with the end-of-sequence token, the one stop token that every model knows. Neither renders tools: see
``isthmus.data.chat.template_capabilities``.
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
    """The template for a tokenizer without one, and its name (``"chatml"`` or ``"plain"``) as (name, template).

    Args:
        vocabulary: every token, special ones included.
        adds_bos: whether the tokenizer puts its bos token before a text; the template then does so too.
    """
    name, template = ("chatml", CHATML) if all(mark in vocabulary for mark in CHATML_MARKS) else ("plain", _PLAIN)
    return name, ("{{- bos_token -}}" if adds_bos else "") + template
