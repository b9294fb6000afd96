"""Recognised templates: turn by turn they write what they write at once; all others are left to comparison."""

from __future__ import annotations

import pytest

from isthmus.data.chat.chat_records import Conversation
from isthmus.data.chat.chat_text import ChatRenderer
from isthmus.data.chat.template_capabilities import CHATML, default_template
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.hf.tokenizer.turn_template import turn_template

GIVEN = {"bos_token": "<s>", "eos_token": "</s>"}
HEAD, TAIL = "{% for m in messages %}", "{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
SET = "{{ messages[0]['role'] }}{% set n = bos_token %}"
FIRST = SET + HEAD + (
    "{% set c = m.content | trim %}{% if loop.first %}{{ n }}{% endif %}{{ loop.index0 }}"
    "{{ m.role + ':' + c }}\n" + TAIL
)  # fmt: skip
TALK = [
    {"role": "user", "content": " What is the sea?\n"},
    {"role": "assistant", "content": "Wide and blue ✓."},
    {"role": "user", "content": "And a strait?"},
    {"role": "assistant", "content": "It joins\ntwo."},
]


def build(template: str) -> Tokenizer:
    return Tokenizer(train_tokenizer(["sea strait"], vocab_size=270, chat_template=template))


@pytest.mark.parametrize("template", [CHATML, FIRST, HEAD + "{{ m.content }}{{ eos_token }}" + TAIL])
def test_turns_concatenate_to_the_rendered_text(template):
    tokenizer = build(template)
    turns, opening = tokenizer.apply_by_turn(TALK)
    for k in range(1, len(TALK) + 1):
        assert "".join(turns[:k]) == tokenizer.apply_chat_template(TALK[:k])
        asked = tokenizer.apply_chat_template(TALK[:k], add_generation_prompt=True)
        assert "".join(turns[:k]) + opening == asked


@pytest.mark.parametrize("template", [CHATML, FIRST, default_template(set(), adds_bos=False)[1]])
@pytest.mark.parametrize("loss_on", ["assistant", "last"])
def test_loss_tokens_equal_those_by_comparison(template, loss_on, monkeypatch):
    tokenizer = build(template)
    talk = Conversation(TALK, None, "f:1")
    texts = ChatRenderer(tokenizer, loss_on=loss_on)(talk)
    monkeypatch.setattr(Tokenizer, "apply_by_turn", lambda self, messages: None)
    assert texts == ChatRenderer(tokenizer, loss_on=loss_on)(talk)


@pytest.mark.parametrize(
    "template",
    [
        HEAD + "{{ m.content }}{% if loop.last %}!{% endif %}" + TAIL,
        HEAD + "{{ m.content }}{{ messages | length }}" + TAIL,
        HEAD + "{{ messages[loop.index0 - 1].content }}" + TAIL,
        HEAD + "{{ messages[-1].content }}" + TAIL,
        HEAD + "{{ m.content }}" + TAIL + "{{ eos_token }}",
        HEAD + "{{ m.content }}" + TAIL.replace("{% endif", "{% else %}.{% endif"),
        HEAD + "{{ m.content }}" + TAIL.replace("A:", "{{ messages[0].role }}"),
        HEAD + "{{ m.content }}{% if add_generation_prompt %}!{% endif %}" + TAIL,
        HEAD + "{{ m.content }}{{ strftime_now('%S') }}" + TAIL,
        HEAD + "{{ [1, 2] | random }}" + TAIL,
        HEAD + "{{ loop.nextitem }}" + TAIL,
        HEAD + "{% break %}" + TAIL,
        "{% set messages = messages[1:] %}" + HEAD + "{{ m.content }}" + TAIL,
        "{% set loop = messages %}" + HEAD + "{{ loop.index }}" + TAIL,
        "{% for m in messages if m.role == 'user' %}{{ m.content }}" + TAIL,
        "{% for m in messages | reverse %}{{ m.content }}" + TAIL,
        "{% set ns = namespace(n=0) %}" + HEAD + "{% set ns.n = ns.n + 1 %}{{ ns.n }}" + TAIL,
        "no loop",
        "{{",
    ],
)
def test_other_templates_are_rendered_by_comparison(template):
    assert turn_template(template, GIVEN) is None


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "user", "content": "a", "name": "b"},
        {"role": "user", "content": ["a"]},
        {"role": "user", "content": "\ue002"},
        {"role": "user"},
    ],
)
def test_other_turns_are_rendered_by_comparison(turn):
    recognised = turn_template(CHATML, GIVEN)
    assert recognised is not None and recognised([turn]) is None
