"""Templates by name have the published formats, and exactly the answers and calls have loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isthmus.data.chat.chat_records import Conversation, parse_record
from isthmus.data.chat.chat_templates import TEMPLATE_TOKENS, find_template
from isthmus.data.chat.chat_text import AnswerRenderer, ChatRenderer
from isthmus.data.chat.conversation_settings import ChatSettings
from isthmus.data.chat.message_normalization import Message
from isthmus.data.chat.preference_records import parse_preference
from isthmus.data.readers.chunks import Record
from isthmus.errors import MissingInput, UsageError
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import Tokenizer

MARKS = sorted({token for tokens in TEMPLATE_TOKENS.values() for token in tokens})
SYSTEM: Message = {"role": "system", "content": "Be brief."}
TALK: list[Message] = [
    {"role": "user", "content": "The sea?"},
    {"role": "assistant", "content": "Blue."},
    {"role": "user", "content": "Wide?"},
    {"role": "assistant", "content": "Very."},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "tide",
        "description": "Height of the tide.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALL = {"name": "tide", "arguments": {"place": "Wick"}}
CALLS: list[Message] = [
    {"role": "user", "content": "The tide in Wick?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00000", "type": "function", "function": CALL}],
    },
    {"role": "tool", "content": "three metres", "name": "tide", "tool_call_id": "call00000"},
    {"role": "assistant", "content": "It is 3 m."},
]  # fmt: skip
THOUGHTS: list[Message] = [
    {**turn, "reasoning_content": "It rains."} if turn["role"] == "assistant" else turn for turn in TALK
]
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions. "
)
ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"


@pytest.fixture(scope="module")
def build() -> Callable[..., Tokenizer]:
    base = train_tokenizer(["the sea is wide " * 9], vocab_size=400, special_tokens=["<s>", "</s>", *MARKS])

    def build(template: str | None = None, eos: str | None = "</s>", *, adds_bos: bool = False) -> Tokenizer:
        inner = type(base)(tokenizer_object=base.backend_tokenizer, bos_token="<s>", eos_token=eos)
        inner.chat_template = "{{ messages[0].content }}"
        tokenizer = Tokenizer(inner)
        tokenizer.bos_id = inner.bos_token_id if adds_bos else None
        if template is not None:
            tokenizer.use_chat_template(template)
        return tokenizer

    return build


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "llama2",
            "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nThe sea? [/INST] Blue. </s><s>[INST] Wide? [/INST] Very. </s>",
        ),
        ("mistral", "<s>[INST] The sea?[/INST] Blue.</s>[INST] Be brief.\n\nWide?[/INST] Very.</s>"),
        (
            "zephyr",
            "<|system|>\nBe brief.</s>\n<|user|>\nThe sea?</s>\n<|assistant|>\nBlue.</s>\n<|user|>\nWide?</s>\n"
            "<|assistant|>\nVery.</s>\n",
        ),
        (
            "phi4",
            "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>The sea?<|im_end|>"
            "<|im_start|>assistant<|im_sep|>Blue.<|im_end|><|im_start|>user<|im_sep|>Wide?<|im_end|>"
            "<|im_start|>assistant<|im_sep|>Very.<|im_end|>",
        ),
        (
            "chatml",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nThe sea?<|im_end|>\n<|im_start|>assistant\n"
            "Blue.<|im_end|>\n<|im_start|>user\nWide?<|im_end|>\n<|im_start|>assistant\nVery.<|im_end|>\n",
        ),
        (
            "gemma",  # with a system prompt as Gemma 3 has it
            "<s><start_of_turn>user\nBe brief.\n\nThe sea?<end_of_turn>\n<start_of_turn>model\nBlue.<end_of_turn>\n"
            "<start_of_turn>user\nWide?<end_of_turn>\n<start_of_turn>model\nVery.<end_of_turn>\n",
        ),
        (
            "alpaca",
            "Be brief.\n\n### Instruction:\nThe sea?\n\n### Response:\nBlue.</s>\n\n### Instruction:\nWide?\n\n"
            "### Response:\nVery.</s>\n\n",
        ),
        ("vicuna", "Be brief. USER: The sea? ASSISTANT: Blue.</s>USER: Wide? ASSISTANT: Very.</s>"),
    ],
)  # fmt: skip
def test_published_formats(build: Callable[..., Tokenizer], name: str, text: str) -> None:
    assert build(name).apply_chat_template([SYSTEM, *TALK]) == text


def test_default_system_prompts(build: Callable[..., Tokenizer]) -> None:
    asked = {"add_generation_prompt": True}
    assert build("vicuna").apply_chat_template(TALK[:1], **asked) == f"{VICUNA}USER: The sea? ASSISTANT:"
    assert build("alpaca").apply_chat_template(TALK[:1], **asked) == (
        f"{ALPACA}### Instruction:\nThe sea?\n\n### Response:\n"
    )


TOOL_TALKS = {
    "calls": ([SYSTEM, *CALLS], [TOOL]),
    "result": (CALLS[:3], [TOOL]),
    "reasoning after a call": (THOUGHTS[:1] + CALLS[1:3] + THOUGHTS[1:2], [TOOL]),
}
TALKS: dict[str, Any] = {"talk": (TALK, None), "system": ([SYSTEM, *TALK], None), "reasoning": (THOUGHTS, None)}
ORIGINALS = {
    "qwen2.5": ("qwen2_5", TALKS | TOOL_TALKS),
    "qwen3": ("qwen3", TALKS | TOOL_TALKS),
    "llama3": ("llama3", TALKS),
}


@pytest.mark.slow_cases("qwen2.5")
@pytest.mark.parametrize("name", ORIGINALS)
def test_text_is_that_of_the_original(build: Callable[..., Tokenizer], name: str) -> None:
    original, talks = ORIGINALS[name]
    tokenizer, reference = build(name), build(source_of(original))
    for talk, (messages, tools) in talks.items():
        assert rendered(tokenizer, messages, tools) == rendered(reference, messages, tools), talk


@pytest.mark.parametrize(("name", "original"), [("gemma", "gemma"), ("phi3", "phi3"), ("deepseek", "deepseekv3")])
def test_talk_is_that_of_the_original(build: Callable[..., Tokenizer], name: str, original: str) -> None:
    tokenizer, reference = build(name, "<｜end▁of▁sentence｜>"), build(source_of(original), "<｜end▁of▁sentence｜>")  # noqa: RUF001
    for messages in (TALK, TALK[:1]) if name == "gemma" else ([SYSTEM, *TALK], TALK):
        expected = reference.apply_chat_template(messages)
        if name == "phi3":  # ends a conversation with EOS, which a model never generates
            expected = expected.removesuffix("<｜end▁of▁sentence｜>")  # noqa: RUF001
        assert tokenizer.apply_chat_template(messages) == expected
    if name != "deepseek":  # DeepSeek-R1 begins its answers with <think>
        assert rendered(tokenizer, TALK[:1], None) == rendered(reference, TALK[:1], None)


def test_calls_of_llama(build: Callable[..., Tokenizer]) -> None:
    text = build("llama3").apply_chat_template([SYSTEM, *CALLS], [TOOL])
    original = build(source_of("llama3_1")).apply_chat_template([SYSTEM, *CALLS], [TOOL])
    assert text.split("<|eot_id|>")[2:] == original.split("<|eot_id|>")[2:]
    assert '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "tide", "parameters": {"place": "Wick"}}' in text
    assert '<|start_header_id|>ipython<|end_header_id|>\n\n"three metres"<|eot_id|>' in text


def source_of(original: str) -> str:
    trl = pytest.importorskip("trl", reason="TRL, which has the original templates, is not installed (extra: bench)")
    return str(Path(trl.__file__).parent / "chat_templates" / f"{original}.jinja")


def rendered(tokenizer: Tokenizer, messages: list[Message], tools: Any) -> str:
    return tokenizer.apply_chat_template(messages, tools, add_generation_prompt=messages[-1]["role"] != "assistant")


ENDS = dict.fromkeys(("alpaca", "vicuna", "zephyr", "mistral"), "</s>") | dict.fromkeys(
    ("chatml", "qwen2.5", "qwen3", "phi4"), "<|im_end|>"
)
ENDS |= {"llama2": " </s>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "phi3": "<|end|>"}
ENDS |= {"deepseek": "<｜end▁of▁sentence｜>"}  # noqa: RUF001


@pytest.mark.parametrize("name", TEMPLATE_TOKENS)
def test_answers_and_calls_have_loss(build: Callable[..., Tokenizer], name: str) -> None:
    """With the end of each turn; system prompt, questions and results of tools have none."""
    tokenizer = build(name)
    render = ChatRenderer(tokenizer)
    spans = [span for chat in render(Conversation(TALK, None, "")) for span in texts_with_loss(chat)]
    think = "<think>\n\n</think>\n\n" if name == "qwen3" else ""
    assert [span.strip() for span in spans[-2:]] in (
        [f"Blue.{ENDS[name]}", f"{think}Very.{ENDS[name]}"], [f"{think}Blue.{ENDS[name]}", f"{think}Very.{ENDS[name]}"]
    )  # fmt: skip
    assert tokenizer.turn_end_id == tokenizer.inner.convert_tokens_to_ids(ENDS[name].strip())
    with_loss = [span for chat in render(Conversation([SYSTEM, *CALLS], [TOOL], "")) for span in texts_with_loss(chat)]
    assert [span.count("tide") for span in with_loss] == [1, 0]
    assert "Wick" in with_loss[0] and with_loss[1].strip().endswith(f"It is 3 m.{ENDS[name]}")
    assert not any("metres" in span or "brief" in span or "?" in span for span in with_loss)
    full = render(Conversation([SYSTEM, *CALLS], [TOOL], ""))[-1].text
    assert all(part in full for part in ("Height of the tide.", "three metres", "Be brief.", "The tide in Wick?"))


def texts_with_loss(chat: Any) -> list[str]:
    return [chat.text[start:end] for start, end in chat.loss_spans]


SHAREGPT_CALLS = {
    "conversations": [
        {"from": "human", "value": "The tide in Wick?"},
        {"from": "function_call", "value": '{"name": "tide", "arguments": {"place": "Wick"}}'},
        {"from": "observation", "value": "three metres"},
        {"from": "gpt", "value": "It is 3 m."},
    ],
    "system": "Be brief.",
    "tools": [TOOL["function"]],
}
SWIFT_CALLS = {
    "messages": [
        SYSTEM,
        {"role": "user", "content": "The tide in Wick?"},
        {"role": "tool_call", "content": '{"name": "tide", "arguments": {"place": "Wick"}}'},
        {"role": "tool_response", "content": "three metres"},
        {"role": "assistant", "content": "It is 3 m."},
    ],
    "tools": [TOOL],
}
LLAMA_CALLS = {
    "messages": [SYSTEM, *CALLS[:2], {"role": "ipython", "content": "three metres"}, CALLS[3]],
    "tools": [TOOL],
}


@pytest.mark.parametrize("record", [SHAREGPT_CALLS, SWIFT_CALLS, LLAMA_CALLS], ids=["sharegpt", "ms-swift", "llama"])
def test_formats_of_calls_are_the_same_text(build: Callable[..., Tokenizer], record: dict[str, Any]) -> None:
    render = ChatRenderer(build("qwen2.5"))
    parsed = parse_record(Record(record, "a.json:1"))
    assert isinstance(parsed, Conversation)
    assert render(parsed) == render(Conversation([SYSTEM, *CALLS], [TOOL], ""))


def test_templates_are_found(build: Callable[..., Tokenizer], tmp_path: Path) -> None:
    template = "{%- for m in messages -%}{{- m.role + m.content + '</s>' -}}{%- endfor -%}"
    (tmp_path / "chat_template.jinja").write_text(template + "\n")
    expected = "userThe sea?</s>assistantBlue.</s>"
    for source in (template, str(tmp_path), str(tmp_path / "chat_template.jinja")):
        assert build(source).apply_chat_template(TALK[:2]) == expected
    assert build(template, adds_bos=True).apply_chat_template(TALK[:2]) == "<s>" + expected
    assert build("gemma", adds_bos=True).apply_chat_template(TALK[:2]).count("<s>") == 1
    with pytest.raises(
        UsageError, match=r"chat.template=llama is neither a text file nor .* Known are alpaca, chatml, "
    ):
        find_template("llama")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for source in (str(tmp_path / "binary"), "a prompt " * 99):
        with pytest.raises(UsageError, match=r"is neither a text file nor a known template \(.*\)\. Known are"):
            find_template(source)
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingInput, match=r"chat_template.jinja does not exist"):
        find_template(str(tmp_path / "empty"))


def test_unusable_templates_are_refused(build: Callable[..., Tokenizer]) -> None:
    with pytest.raises(UsageError, match="alpaca: the tokenizer has no eos_token, which the template needs"):
        build("alpaca", eos=None)
    with pytest.raises(UsageError, match="the chat template rejects these messages"):
        build("{% for m in messages %}")
    with pytest.raises(UsageError, match="does not render the content of assistant turns"):
        build("{% for m in messages %}{{ m.role }}{% endfor %}")
    lacking = train_tokenizer(["the sea " * 9], vocab_size=300, special_tokens=["</s>"])
    with pytest.raises(UsageError, match=r"no <\|im_start\|>, which the template needs. Use another"):
        Tokenizer(lacking).use_chat_template("qwen3")


def test_system_prompts() -> None:
    asked, other = TALK[:2], {"role": "system", "content": "Be long."}
    assert ChatSettings().applied(asked) is asked
    assert ChatSettings("Be brief.").applied(asked) == [SYSTEM, *asked]
    assert ChatSettings("Be brief.").applied([other, *asked]) == [other, *asked]
    assert ChatSettings("Be brief.", override_system=True).applied([other, *asked, other]) == [SYSTEM, *asked]


def test_reasoning_is_kept_or_dropped(build: Callable[..., Tokenizer]) -> None:
    in_text = [
        turn if turn["role"] == "user" else {**turn, "content": f"<think>\nIt rains.\n</think>\n\n{turn['content']}"}
        for turn in TALK
    ]
    for messages in (THOUGHTS, in_text):
        assert ChatSettings(reasoning="drop").applied(messages) == TALK
        assert ChatSettings(reasoning="last").applied(messages) == [*TALK[:3], messages[3]]
        assert ChatSettings(reasoning="keep").applied(messages) is messages
    # phi4 keeps what is in the text, so all answers have their reasoning in one sample.
    for reasoning, thoughts in (("keep", 2), ("last", 1), ("drop", 0)):
        (chat,) = ChatRenderer(build("phi4"), settings=ChatSettings(reasoning=reasoning))(
            Conversation(THOUGHTS, None, "")
        )
        assert chat.text.count("It rains.") == thoughts
        assert sum(span.count("It rains.") for span in texts_with_loss(chat)) == thoughts
    # qwen3 shows only the last reasoning: each answer gets the text before it as the model would see it.
    remaining = ChatRenderer(build("qwen3"))(Conversation(THOUGHTS, None, ""))
    assert [chat.text.count("It rains.") for chat in remaining] == [1, 1]


def test_pairs_have_the_settings(build: Callable[..., Tokenizer]) -> None:
    record = {"prompt": TALK[:1], "chosen": THOUGHTS[1:2], "rejected": TALK[3:]}
    render = AnswerRenderer(build("chatml"), settings=ChatSettings("Be brief.", reasoning="drop"))
    chosen, rejected = render(parse_preference(Record(record, "a.json:1")))
    opening = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nThe sea?<|im_end|>\n<|im_start|>assistant\n"
    assert (chosen.text, rejected.text) == (f"{opening}Blue.<|im_end|>", f"{opening}Very.<|im_end|>")
