"""Chat templates for tokenizers without one.

ChatML if both of its marks are tokens of the vocabulary; else roles are plain text and an assistant turn ends with EOS.
Neither renders tools, see ``isthmus.data.chat.template_capabilities``.
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
    """(name, template), with the name ``"chatml"`` or ``"plain"``; with ``adds_bos`` the template starts with BOS."""
    name, template = ("chatml", CHATML) if all(mark in vocabulary for mark in CHATML_MARKS) else ("plain", _PLAIN)
    return name, ("{{- bos_token -}}" if adds_bos else "") + template
