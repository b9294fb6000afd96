"""Prompts of evaluations from lists and files, as chats and as text."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isthmus.config.load import load_config
from isthmus.errors import DataError, MissingInput, UsageError
from isthmus.families.blocks.ends import Embedding
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.recipes.data.eval_prompts import EvalPrompt, eval_prompts


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(train_tokenizer(["the sea is blue " * 9], vocab_size=300))


def read(
    tokenizer: Tokenizer, prompts: str, recipe: str = "sft", positions: int | None = None, more: tuple[str, ...] = ()
) -> tuple[EvalPrompt, ...]:
    overrides = ["eval.generate=true", f"eval.prompts={prompts}", "eval.max_new_tokens=9", *more]
    config = load_config(recipe, None, overrides, {"model": "m", "data": ["d"], "out": "o"})
    embedding = Embedding(position="rope" if positions is None else "learned")
    architecture: Any = SimpleNamespace(embedding=embedding, max_position_embeddings=positions)
    return eval_prompts(config, tokenizer, architecture)


def test_a_list_is_chats_for_sft_and_text_for_pretraining(tokenizer: Tokenizer) -> None:
    chat, _ = read(tokenizer, "[the sea, is blue]")
    turn = tokenizer.apply_chat_template([{"role": "user", "content": "the sea"}], add_generation_prompt=True)
    assert (chat.text, tokenizer.decode(chat.input_ids)) == ("the sea", turn) and turn != "the sea"
    asked, _ = read(tokenizer, "[the sea, is blue]", more=("chat.system=blue",))
    system = tokenizer.apply_chat_template([{"role": "system", "content": "blue"}])
    assert tokenizer.decode(asked.input_ids) == system + turn
    ignores_system = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }};{% endif %}{% endfor %}"
    other = Tokenizer(train_tokenizer(["the sea is blue " * 9], vocab_size=300))
    other.use_chat_template(ignores_system)
    asked, _ = read(other, "[the sea, is blue]", more=("chat.system=blue",))
    assert other.decode(asked.input_ids) == "blue\n\nthe sea;"  # as in training
    plain, _ = read(tokenizer, "[the sea, is blue]", "pretrain")
    assert tokenizer.decode(plain.input_ids) == "the sea"
    config = load_config("sft", None, [], {"model": "m", "data": ["d"], "out": "o"})
    assert eval_prompts(config, tokenizer, SimpleNamespace()) == ()  # type: ignore[arg-type]


def test_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("the sea\n\nis blue\n")
    assert [prompt.text for prompt in read(tokenizer, str(lines))] == ["the sea", "is blue"]
    chats = tmp_path / "prompts.jsonl"
    turns = [{"from": "system", "value": "blue"}, {"from": "human", "value": "the sea"}]
    chats.write_text(json.dumps({"messages": turns}) + "\n" + '{"prompt": "is\u2028blue"}\n', encoding="utf-8")
    first, second = read(tokenizer, str(chats))
    assert (first.text, second.text) == ("the sea", "is\u2028blue") and "system" in tokenizer.decode(first.input_ids)


@pytest.mark.parametrize(
    ("content", "recipe", "message"),
    [
        ('{"messages": [{"role": "user", "content": "a"}]}', "pretrain", r"p\.jsonl:1: pretrain continues text"),
        ('{"question": "a"}', "sft", r"p\.jsonl:1: expected text, or an object with prompt or messages, got"),
        ("{", "sft", "has a line that is not JSON"),
        ("\n", "sft", "has no prompts. Write one per line"),
    ],
)
def test_bad_files(tokenizer: Tokenizer, tmp_path: Path, content: str, recipe: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read(tokenizer, str(path), recipe)


def test_bad_settings(tokenizer: Tokenizer) -> None:
    with pytest.raises(MissingInput, match=r"is no file\. Give a file, or a list"):
        read(tokenizer, "nowhere.txt")
    with pytest.raises(UsageError, match=r"more than the 10 learned positions of this model\. Lower eval"):
        read(tokenizer, "[the sea is blue]", positions=10)
    flags = {"model": "m", "data": ["d"], "out": "o"}
    with pytest.raises(UsageError, match=r"eval\.prompts  is missing"):
        load_config("sft", None, ["eval.generate=true"], flags)
    with pytest.raises(UsageError, match=r"max_new_tokens is for generate=true, got false; set eval\.generate"):
        load_config("sft", None, ["eval.max_new_tokens=3"], flags)
