"""Hostile chat templates end with exit code 77; others render what transformers renders."""

from __future__ import annotations

import time

import pytest
from transformers.utils import chat_template_utils

from isthmus.data.chat.chat_templates import TEMPLATE_TOKENS, find_template
from isthmus.data.chat.template_capabilities import default_template
from isthmus.errors import DataError, UnsafeInput
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer import template_meter
from isthmus.hf.tokenizer.bounded_template import render_jinja_template, template_errors
from isthmus.hf.tokenizer.tokenizer import Tokenizer

GIVEN = {"bos_token": "<s>", "eos_token": "</s>"}
ASKED = [{"role": "user", "content": "hi"}]
NS = "{% set ns = namespace(s='ab', l=[1], m=[2], n=3) %}"
GROW = NS + "{% for i in range(64) %}{% set ns.s = EXPRESSION %}{% endfor %}"
NEST = NS + "{% for i in range(64) %}{% set ns.l = EXPRESSION %}{% endfor %}{{ ns.l }}"
TWICE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
LONG = "{% set a = 'a' * 30000000 %}{% set b = ('a' * 29999999) + 'a' %}"

HOSTILE = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{{ j }}{% endfor %}{% endfor %}",
    "marked loops": "{% generation %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% endgeneration %}",
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "lazy loops": "{% for i in range(99999) %}{{ range(99999) | map('string') | list | length }}{% endfor %}",
    "recursive loops": "{% for x in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "macros": TWICE,
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "comparisons": LONG + "{% if a == b %}{% endif %}" * 300,
    "searches": LONG + "{% if 'b' ~ a in b ~ a %}{% endif %}" * 300,
    "product": "{{ 'a' * 10**10 }}",
    "power": "{{ 10 ** (10 ** 8) }}",
    "squares": NS + "{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
    "sums": GROW.replace("EXPRESSION", "ns.s + ns.s"),
    "concatenations": GROW.replace("EXPRESSION", "ns.s ~ ns.s"),
    "replacements": GROW.replace("EXPRESSION", "ns.s.replace('a', ns.s)"),
    "replace filter": GROW.replace("EXPRESSION", "ns.s | replace('a', 'aa')"),
    "set blocks": NS + "{% for i in range(64) %}{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}"
    "{% set ns.s = t %}{% endfor %}",
    "joins": GROW.replace("EXPRESSION", "ns.s.join(ns.s | list)"),
    "escapes": GROW.replace("EXPRESSION", "('<' ~ ns.s ~ ns.s) | forceescape"),
    "list pairs": NEST.replace("EXPRESSION", "[ns.l, ns.l]"),
    "compared pairs": NS + "{% for i in range(64) %}{% set ns.l = (ns.l, ns.l) %}"
    "{% set ns.m = (ns.m, ns.m) %}{% endfor %}{{ ns.l == ns.m }}",
    "dict pairs": NEST.replace("EXPRESSION", "dict(a=ns.l, b=ns.l)"),
    "cycler pairs": NEST.replace("EXPRESSION", "cycler(ns.l, ns.l).items"),
    "arguments": "{% macro f(n) %}{% if n %}{{ f(n - 1, varargs, varargs) }}{% endif %}{% endmacro %}{{ f(60, 1) }}",
    "output": "{% set b = 'a' * 9999999 %}{% for i in range(99999) %}{{ b }}{% endfor %}",
    "shown lists": "{% set b = ['a' * 999999] %}{% set x %}{% for i in range(99999) %}{{ b }}{% endfor %}{% endset %}",
    "percent width": "{{ '%1000000000d' % 3 }}",
    "computed width": "{{ '%*d' % (1000000000, 3) }}",
    "format width": "{{ '{:>1000000000}'.format(3) }}",
    "nested width": "{{ '{:{}}'.format(3, 1000000000) }}",
    "format method": "{{ ('{:>1000000000}' | attr('format'))(3) }}",
    "format filter": "{{ ['%1000000000d'] | map('format', 3) | list }}",
    "center": "{{ 'a' | center(10 ** 9) }}",
    "zfill": "{{ 'a'.zfill(10 ** 10) }}",
    "tabs": "{{ '\\t'.expandtabs(10 ** 10) }}",
    "indent": "{{ ('a\\n' * 99999) | indent('a' * 99999) }}",
    "json": "{{ [[1]] | tojson(indent=10 ** 9) }}",
    "bytes": "{{ (5).to_bytes(10 ** 10, 'big') }}",
    "slow filter": "{{ ('www.' * 999999) | urlize }}",
    "list sums": "{{ ([[1]] * 99999) | sum(start=[]) | length }}",
    "characters": "{{ ('\u3042' * 30000000) | list | length }}",
    "quadratic": "{{ ('a' * 30000000).rfind('b' + 'a' * 1000000) }}",
    "digits": "{{ ('9' * 9999999) | int(0, 3) }}",
    "depth": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "length": "{{ 1 }}" * 50_000,
}  # fmt: skip


@pytest.mark.slow_cases("comparisons", "searches")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_is_refused_within_its_limits(name, monkeypatch):
    monkeypatch.setattr(template_meter, "TIME_S", 0.03)
    began_s = time.thread_time()
    with pytest.raises(UnsafeInput, match=r"^the chat template of models/evil is refused: "):
        with template_errors("the chat template of models/evil"):
            render_jinja_template([ASKED], chat_template=HOSTILE[name])
    assert time.thread_time() - began_s < 3


def test_limit_holds_for_every_rendering_and_names_the_folder(tmp_path):
    later = "{% for m in messages %}{{ m.content }}{% if loop.index > 4 %}{{ 'a' * 10**10 }}{% endif %}{% endfor %}"
    tokenizer = Tokenizer(train_tokenizer(["hi"], vocab_size=270, chat_template=later), tmp_path)
    for _ in range(3):
        assert tokenizer.apply_chat_template(ASKED) == "hi"
        with pytest.raises(UnsafeInput, match=rf"the chat template of {tmp_path} is refused: it makes a text"):
            tokenizer.apply_chat_template(ASKED * 5)
    by_turn = "{% for m in messages %}{{ m.content * 10 ** 10 }}{% endfor %}"
    with pytest.raises(UnsafeInput, match=r"^chat\.template=.* is refused"):
        tokenizer.use_chat_template(by_turn)


CALL = {"type": "function", "id": "call00000", "function": {"name": "tide0", "arguments": {"port": "Brest", "n": 3}}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tide{number}",
            "description": "High tide of a port.",
            "parameters": {"type": "object", "properties": {"port": {"type": "string"}}, "required": ["port"]},
        },
    }
    for number in range(300)
]
WITH_TOOLS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "tide?"},
    {"role": "assistant", "content": "", "reasoning_content": "I call it.", "tool_calls": [CALL]},
    {"role": "tool", "content": "17:20", "name": "tide0", "tool_call_id": "call00000"},
    {"role": "assistant", "content": "<think>\nNow.\n</think>\n\nAt 17:20."},
]
MANY_TURNS = [
    {"role": ("user", "assistant")[k % 2], "content": f"{k} " + "The sea is wide. " * 20} for k in range(1000)
]


@pytest.mark.slow_cases("deepseek", "llama3", "mistral", "qwen2.5", "qwen3")
@pytest.mark.parametrize("name", [*TEMPLATE_TOKENS, "plain"])
def test_shipped_templates_render_what_transformers_renders(name):
    template = default_template(set(), adds_bos=False)[1] if name == "plain" else find_template(name)[0]
    for messages, tools in ((MANY_TURNS, None), (MANY_TURNS[:2], TOOLS), (WITH_TOOLS, TOOLS[:2])):
        for opened in (False, True):
            arguments = {"tools": tools, "chat_template": template, "add_generation_prompt": opened, **GIVEN}
            rendered = []
            for render in (chat_template_utils.render_jinja_template, render_jinja_template):
                try:
                    rendered.append(render([messages], **arguments))
                except Exception as error:
                    rendered.append(repr(error))
            assert rendered[0] == rendered[1]


@pytest.mark.parametrize(
    "template",
    [
        "{{ '%s is %d' % (messages[0].content, 5) }}{{ '{:>4}|{0}'.replace('0', '') .format(1, 2) }}",
        "{{ messages[0].content.upper().split('I') | join('+') }}{{ [1, 2] + [3] }}{{ messages[::-1] | length }}",
        "{% for m in messages | selectattr('role', 'equalto', 'user') %}{{ loop.length }}{{ loop.last }}{% endfor %}",
        "{% for k, v in messages[0].items() %}{{ k ~ '=' ~ v }}{% else %}none{% endfor %}",
        "{{ messages[0] | tojson(indent=2) }}{{ [] | list }}",
        "{% macro f(a, b='x') %}{{ varargs }}{{ a * 2 }}{{ b }}{% endmacro %}{{ f('y', 'z', 1) }}{{ '<' | e }}",
        "{% for n in [[1, [2]], [3]] recursive %}{{ n if n is number else loop(n) }}{% endfor %}{{ 7 ** 2 % 5 }}",
        "{{ messages[0].missing }}{{ messages[0].get('x', 'y') }}{{ namespace(a=1).a }}",
        "{{ 'i' in messages[0].content }}{{ messages[0]['role'] in ['user', 'x' ~ 1] }}{{ {'a': messages}['a'][0] }}",
        "{% for x in none %}{% endfor %}",
        "{{ messages[0].content.nothing() }}",
    ],
)
def test_operations_are_those_of_transformers(template):
    rendered = []
    for render in (chat_template_utils.render_jinja_template, render_jinja_template):
        try:
            rendered.append(render([ASKED], chat_template=template))
        except Exception as error:
            rendered.append(f"{type(error).__name__}: {error}")
    assert rendered[0] == rendered[1]


def test_wrong_template_is_bad_data():
    for template in ("{{ lipsum(5) }}", "{% for i in range(9) %}" * 25 + "{% endfor %}" * 25, "{% include 'x' %}"):
        with pytest.raises(DataError), template_errors("T"):
            render_jinja_template([ASKED], chat_template=template)
