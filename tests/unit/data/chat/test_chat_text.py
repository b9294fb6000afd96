"""Exactly the assistant's tokens and the turn-ending token are learned, whatever the chat template does."""

from __future__ import annotations

from itertools import groupby

import pytest

from isthmus.data.chat.chat_records import Conversation
from isthmus.data.chat.chat_text import ChatRenderer, LossOn
from isthmus.data.chat.loss_spans import token_mask
from isthmus.data.chat.message_normalization import Message
from isthmus.data.chat.template_capabilities import CHATML, default_template
from isthmus.errors import DataError
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import Tokenizer

SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|user|>", "<|assistant|>", "<|end|>", "<|calls_end|>",
)  # fmt: skip
TEXTS = [
    "What is the sea? The sea is wide and blue, and a strait joins two of them.",
    "user assistant system tool " * 9,
]

LLAMA3 = (
    "{{- bos_token -}}{%- for m in messages -%}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + (m.content | trim) + '<|eot_id|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}"
)
LLAMA2 = (
    "{%- for m in messages -%}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{- raise_exception('must alternate') -}}{%- endif -%}"
    "{%- if m.role == 'user' -%}{{- bos_token + '[INST] ' + m.content + ' [/INST]' -}}"
    "{%- else -%}{{- ' ' + m.content + ' ' + eos_token -}}{%- endif -%}{%- endfor -%}"
)
# Drops the reasoning of earlier turns, and writes an empty one into the last (as Qwen3 does).
THINKING = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' -}}"
    "{%- if m.role == 'assistant' -%}{%- set words = m.content.split('</think>')[-1].lstrip('\n') -%}"
    "{%- if loop.last -%}{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' -}}{%- endif -%}{{- words -}}"
    "{%- else -%}{{- m.content -}}{%- endif -%}{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
MARKED = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' -}}"
    "{%- if m.role == 'assistant' -%}{%- generation -%}{{- m.content + '<|im_end|>\n' -}}{%- endgeneration -%}"
    "{%- else -%}{{- m.content + '<|im_end|>\n' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
MARKED_WORDS = MARKED.replace("m.content + '<|im_end|>\n' -}}{%- endgen", "m.content -}}{%- endgen").replace(
    "{%- endgeneration -%}", "{%- endgeneration -%}{{- '<|im_end|>\n' -}}"
)
# Ends each turn, then the whole conversation (as Phi-3 does).
TWO_ENDS = (
    "{%- for m in messages -%}{{- '<|' + m.role + '|>\n' + m.content + '<|end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- else -%}{{- eos_token -}}{%- endif -%}"
)
# Opens an answer with more than an answer holds (as DeepSeek-R1 does).
LONG_OPENING = (
    "{{- bos_token -}}{%- for m in messages -%}"
    "{%- if m.role == 'user' -%}{{- '<|user|>' + m.content -}}{%- else -%}{{- '<|assistant|>' + m.content + '</s>' -}}"
    "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|><think>\n' -}}{%- endif -%}"
)
COUNTING = "{{- messages | length ~ ' turns\n' -}}" + CHATML
BACKWARDS = (
    "{%- for m in messages | reverse -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
)
MUTE = "{%- for m in messages -%}{%- if m.role == 'user' -%}{{- m.content + '<|im_end|>' -}}{%- endif -%}{%- endfor -%}"

TALK: list[Message] = [
    {"role": "user", "content": "What is the sea?"},
    {"role": "assistant", "content": "Wide and blue."},
    {"role": "user", "content": "And a strait?"},
    {"role": "assistant", "content": "It joins two ✓."},
]
SYSTEM: Message = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def build():
    """A tokenizer with any template; trained once."""
    base = train_tokenizer(TEXTS, vocab_size=400, special_tokens=SPECIALS, chat_template=None)

    def build(template: str | None, bos: str | None = "<s>", eos: str = "</s>") -> Tokenizer:
        inner = type(base)(tokenizer_object=base.backend_tokenizer, bos_token=bos, eos_token=eos)
        inner.chat_template = template
        return Tokenizer(inner)

    return build


def learned(
    tokenizer: Tokenizer, messages: list[Message], loss_on: LossOn = "assistant", tools=None
) -> list[list[str]]:
    """For each text, the runs of learned tokens, decoded."""
    runs = []
    for chat in ChatRenderer(tokenizer, loss_on=loss_on)(Conversation(messages, tools, "file.jsonl:7")):
        ((ids, offsets),) = tokenizer.encode_with_offsets([chat.text])
        assert tokenizer.decode(ids) == chat.text
        mask = token_mask(offsets, chat.loss_spans)
        pairs = zip(ids, mask.tolist(), strict=True)
        runs.append([tokenizer.decode([i for i, _ in run]) for on, run in groupby(pairs, lambda p: p[1]) if on])
    return runs


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (CHATML, [SYSTEM, *TALK], [["Wide and blue.<|im_end|>", "It joins two ✓.<|im_end|>"]]),
        (LLAMA3, [SYSTEM, *TALK], [["Wide and blue.<|eot_id|>", "It joins two ✓.<|eot_id|>"]]),
        (LLAMA2, TALK, [[" Wide and blue. </s>", " It joins two ✓. </s>"]]),
        (MARKED, [SYSTEM, *TALK], [["Wide and blue.<|im_end|>", "It joins two ✓.<|im_end|>"]]),
        (MARKED_WORDS, [SYSTEM, *TALK], [["Wide and blue.<|im_end|>", "It joins two ✓.<|im_end|>"]]),
        (TWO_ENDS, TALK, [["Wide and blue.<|end|>", "It joins two ✓.<|end|>"]]),
        (LONG_OPENING, TALK, [["Wide and blue.</s>", "It joins two ✓.</s>"]]),
        (COUNTING, TALK, [["Wide and blue.<|im_end|>"], ["It joins two ✓.<|im_end|>"]]),
        (
            THINKING,
            TALK,
            [["<think>\n\n</think>\n\nWide and blue.<|im_end|>"], ["<think>\n\n</think>\n\nIt joins two ✓.<|im_end|>"]],
        ),
        (None, TALK, [["Wide and blue.<|im_end|>", "It joins two ✓.<|im_end|>"]]),
    ],
    ids=["chatml", "llama3", "llama2", "marked", "marked-words", "two-ends", "opening", "counting", "thinking", "none"],
)
def test_loss_on_answers_and_their_end_tokens(build, template, messages, expected):
    assert learned(build(template), messages) == expected


def test_text_without_reasoning_of_earlier_turns_is_the_context_of_the_last(build):
    chats = ChatRenderer(build(THINKING))(Conversation([*TALK], None, "f:1"))
    assert "think" not in chats[1].text[: chats[1].loss_spans[0][0]]
    assert chats[1].text.startswith(
        "<|im_start|>user\nWhat is the sea?<|im_end|>\n<|im_start|>assistant\nWide and blue."
    )


def test_answer_that_begins_like_the_generation_prompt(build):
    talk = [TALK[0], {"role": "assistant", "content": "<b>Wide</b>"}]
    assert learned(build(LONG_OPENING), talk) == [["<b>Wide</b></s>"]]


def test_loss_up_to_the_turn_end_token(build):
    talk = [TALK[0], {"role": "assistant", "content": "Wide<|calls_end|>"}]
    assert learned(build(LONG_OPENING), talk) == [["Wide<|calls_end|></s>"]]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_loss_on_last_answer(build, template):
    assert learned(build(template), [*TALK, TALK[0]], "last") == [["It joins two ✓.<|im_end|>"]]


def test_loss_on_all(build):
    tokenizer = build(CHATML)
    (run,) = learned(tokenizer, TALK, "all")
    assert run == [tokenizer.apply_chat_template(TALK)]


def test_conversation_without_loss_gives_no_text(build):
    template = "{%- for m in messages -%}{{- m.content + eos_token -}}{%- endfor -%}"
    assert learned(build(template), [{"role": "assistant", "content": "Blue.", "weight": 0}], "all") == []


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_turns_with_weight_zero_have_no_loss(build, template):
    talk = [TALK[0], {**TALK[1], "weight": 0}, *TALK[2:]]
    assert learned(build(template), talk) == [["It joins two ✓.<|im_end|>"]]
    assert learned(build(template), talk[:2]) == []
    tokenizer = build(template)
    full = tokenizer.apply_chat_template(talk)
    assert learned(tokenizer, talk, "all") == [full.split("Wide and blue.<|im_end|>")]
    with pytest.raises(DataError, match="turn 1 must have no loss, and with loss_on=all"):
        learned(tokenizer, [{**TALK[0], "weight": 0}, *TALK[1:]], "all")


THOUGHT: list[Message] = [TALK[0], {**TALK[1], "reasoning_content": "What is it?"}]
SHOWN = "<think>\nWhat is it?\n</think>\n\nWide and blue."


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (THINKING, SHOWN + "<|im_end|>"),
        (THINKING.replace("m.reasoning_content", "m.thinking"), SHOWN + "<|im_end|>"),
        (CHATML, SHOWN + "<|im_end|>"),
        (MARKED, SHOWN + "<|im_end|>"),
        (LONG_OPENING, SHOWN.removeprefix("<think>\n") + "</s>"),
    ],
    ids=["shown", "shown-by-another-name", "folded", "folded-and-marked", "opening"],
)
def test_reasoning_has_loss(build, template, expected):
    assert learned(build(template), THOUGHT) == [[expected]]


@pytest.mark.slow
def test_reasoning_that_the_template_removes_is_refused(build):
    template = LLAMA2.replace("m.content + ' ' + eos", "m.content.split('</think>')[-1] + ' ' + eos")
    assert learned(build(template), TALK)
    with pytest.raises(DataError, match=r"^file.jsonl:7: this record has reasoning.* removes it"):
        learned(build(template), THOUGHT)


def test_empty_answer_has_loss_on_its_end_token(build):
    assert learned(build(CHATML), [TALK[0], {"role": "assistant", "content": ""}]) == [["<|im_end|>"]]


def test_conversation_that_begins_with_the_assistant(build):
    needs_turn = "{%- if messages[0].role == 'x' -%}{%- endif -%}" + CHATML
    assert learned(build(needs_turn), TALK[1:]) == [["Wide and blue.<|im_end|>", "It joins two ✓.<|im_end|>"]]


def test_template_whose_answers_cannot_be_found_is_refused(build):
    with pytest.raises(DataError, match=r"file\.jsonl:7: .*renders earlier turns after"):
        learned(build(BACKWARDS), TALK)


@pytest.mark.parametrize(
    "template", [MUTE, CHATML.replace("message['content']", "message['content'][0]['text']|d('')")]
)
def test_template_that_does_not_render_answers_is_refused(build, template):
    with pytest.raises(DataError, match="does not render the content of assistant turns"):
        ChatRenderer(build(template))


def test_template_error_names_the_record(build):
    with pytest.raises(DataError, match=r"file\.jsonl:7: .*must alternate"):
        learned(build(LLAMA2), [TALK[0], *TALK])


TOOLS = [{"type": "function", "function": {"name": "depth", "description": "How deep", "parameters": {}}}]
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "depth", "arguments": {"sea": "Red"}}}],
}
TOOL_TALK = [SYSTEM, TALK[0], CALL, {"role": "tool", "content": "2 km"}, TALK[1]]
CALL_TEXT = '<tool_call>\n{"name": "depth", "arguments": {"sea": "Red"}}\n</tool_call>'


@pytest.mark.parametrize(("template", "end"), [(CHATML, "<|im_end|>"), (LLAMA3, "<|eot_id|>"), (LLAMA2, " </s>")])
def test_tools_as_text_for_templates_without_tools(build, template, end):
    tokenizer = build(template)
    blank = " " if template == LLAMA2 else ""
    talk = TOOL_TALK[1:] if template == LLAMA2 else TOOL_TALK
    assert learned(tokenizer, talk, tools=TOOLS) == [[blank + CALL_TEXT + end, f"{blank}Wide and blue.{end}"]]
    (chat,) = ChatRenderer(tokenizer)(Conversation(talk, TOOLS, "f:1"))
    assert '"description": "How deep"' in chat.text
    assert "<tool_response>\n2 km\n</tool_response>" in chat.text


def test_tools_rendered_by_the_template(build):
    template = (
        "{%- if tools -%}{{- 'TOOLS ' + (tools | tojson) -}}{%- endif -%}{%- for m in messages -%}"
        "{{- '<|im_start|>' + m.role + '\n' + m.content -}}"
        "{%- for c in m.tool_calls or [] -%}"
        "{{- c.id ~ c.function.name ~ (c.function.arguments | tojson) -}}{%- endfor -%}"
        "{{- '<|im_end|>\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
    )
    expected = ['call00000depth{"sea": "Red"}<|im_end|>', "Wide and blue.<|im_end|>"]
    assert learned(build(template), TOOL_TALK, tools=TOOLS) == [expected]


def test_default_template_is_chatml_only_with_its_tokens():
    assert default_template({"<|im_start|>", "<|im_end|>"}, adds_bos=False) == ("chatml", CHATML)
    name, template = default_template({"<|im_start|>"}, adds_bos=True)
    assert name == "plain"
    assert template.startswith("{{- bos_token -}}")


def test_plain_default_template_ends_answers_with_eos():
    tokenizer = Tokenizer(train_tokenizer(TEXTS, vocab_size=300, special_tokens=("</s>",), eos_token="</s>", pad_token="</s>", chat_template=None))  # fmt: skip  # noqa: E501
    assert tokenizer.template_source == "plain"
    assert learned(tokenizer, [SYSTEM, *TALK]) == [["Wide and blue.</s>", "It joins two ✓.</s>"]]
    text = tokenizer.apply_chat_template([SYSTEM, *TALK[:2]])
    assert text == "Be brief.\n\n### User:\nWhat is the sea?\n\n### Assistant:\nWide and blue.</s>"
    assert tokenizer.apply_chat_template(TALK[:1], add_generation_prompt=True).endswith("\n\n### Assistant:\n")
