"""Small files that cannot be parsed are refused by name before a conversion copies them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from isthmus.convert.transfer import convert
from isthmus.errors import DataError
from isthmus.hf.companion_files import check_companions
from isthmus.hf.model_folder import ModelFolder
from ranks.tiny import build_model_folder

TOKENIZER = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).to_str()
TEMPLATE = "{% for m in messages %}{% generation %}{{ m['content'] | trim }}{% endgeneration %}{% endfor %}"
SOUND = {
    "tokenizer.json": TOKENIZER,
    "tokenizer_config.json": json.dumps({"chat_template": TEMPLATE, "model_max_length": int(1e30)}),
    "chat_template.jinja": TEMPLATE,
    "chat_template.json": json.dumps({"chat_template": [{"name": "default", "template": TEMPLATE}]}),
    "generation_config.json": json.dumps({"eos_token_id": [1, 2]}),
    "special_tokens_map.json": "{}",
    "vocab.json": json.dumps({"a": 0}),
    "merges.txt": "#version: 0.2\na b\n",
    "qwen.tiktoken": "IQ== 0\nIg== 1\n",
    "LICENSE": "\udcff",
}


def folder_of(path: Path, files: dict[str, str]) -> ModelFolder:
    path.mkdir(exist_ok=True)
    for name, text in files.items():
        (path / name).write_text(text, errors="surrogateescape")
    return ModelFolder(path, {})


def test_sound_files_pass(tmp_path: Path) -> None:
    check_companions(folder_of(tmp_path, SOUND))


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("tokenizer.json", TOKENIZER[:-1], "EOF"),
        ("tokenizer.json", TOKENIZER.replace('"vocab"', '"vocbb"'), "cannot be parsed"),
        ("tokenizer_config.json", '{"a": 1', "is not valid JSON"),
        ("tokenizer_config.json", json.dumps({"chat_template": TEMPLATE[:-3]}), "the chat template has an error"),
        ("tokenizer_config.json", json.dumps({"chat_template": [1]}), "neither a text nor a list"),
        ("chat_template.jinja", TEMPLATE.replace("trim", "trin"), "line 1: No filter named 'trin'"),
        ("chat_template.jinja", "\udcff", "can't decode byte"),
        ("chat_template.json", json.dumps({"chat_template": "{% if %}"}), "the chat template has an error"),
        ("generation_config.json", "[]", "must be a JSON object"),
        ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id must be a number"),
        ("special_tokens_map.json", "", "is not valid JSON"),
        ("vocab.json", '{"a": }', "is not valid JSON"),
        ("merges.txt", "\udcff", "can't decode byte"),
        ("qwen.tiktoken", "IQ== 0\nIg==\n", "line 2 of 3 is not a token with its rank"),
        ("qwen.tiktoken", "I!== 0\n", "cannot be parsed"),
    ],
)
def test_damaged_file_is_named(name: str, text: str, reason: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, SOUND | {name: text})
    with pytest.raises(DataError) as error:
        check_companions(folder)
    assert str(tmp_path / name) in str(error.value)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_damaged_sentencepiece_model(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece", reason="pip install sentencepiece protobuf")
    for content in (b"\n\x05\n\x01", b"\x0b\x05"):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(DataError, match=r"tokenizer\.model"):
            check_companions(ModelFolder(tmp_path, {}))


def test_conversion_refuses_a_damaged_companion(tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "hf", "llama", num_hidden_layers=1)
    (model / "generation_config.json").write_text("{")
    with pytest.raises(DataError, match=r"generation_config\.json is not valid JSON"):
        convert(model, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
