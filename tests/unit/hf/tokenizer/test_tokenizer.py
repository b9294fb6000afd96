"""Tokenizers are read, tell characters and templates, and fail with one clear line."""

from __future__ import annotations

import json
import shutil

import pytest
from transformers import AutoTokenizer

from isthmus.errors import DataError, MissingInput, UnsafeInput, UsageError
from isthmus.hf.tiny_model import END_OF_TEXT, TURN_END, TURN_START, train_tokenizer
from isthmus.hf.tokenizer.tokenizer import Tokenizer, load_tokenizer, save_tokenizer

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "blue"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(["the sea is blue " * 9, "hi user assistant"], vocab_size=300), path)
    return path


def test_tokenizer_of_a_folder(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.special_tokens == (END_OF_TEXT, TURN_START, TURN_END)
    assert (tokenizer.eos_id, tokenizer.bos_id) == (2, None)
    assert tokenizer.vocab_size == len(tokenizer.inner)
    assert (tokenizer.template_source, tokenizer.differs_from_files, tokenizer.has_generation_marks) == (
        "tokenizer",
        False,
        False,
    )
    text = tokenizer.apply_chat_template(TALK[:1], add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    plain = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode_batch([text, "the sea ✓"]) == [plain.encode(text), plain.encode("the sea ✓")]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_saved_config_is_readable_by_older_transformers(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["additional_special_tokens"] == [TURN_START]
    assert "extra_special_tokens" not in config


def test_offsets_cover_every_character(folder):
    tokenizer = load_tokenizer(folder)
    text = "  the  sea\n\n ✓🙂 <|im_end|> "
    ((ids, offsets),) = tokenizer.encode_with_offsets([text])
    assert tokenizer.decode(ids) == text
    assert {k for start, end in offsets for k in range(start, end)} == set(range(len(text)))


def test_offsets_are_not_trimmed():
    from tokenizers import processors

    inner = train_tokenizer(["the sea is blue " * 9], vocab_size=300)
    inner.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    ((_, offsets),) = Tokenizer(inner).encode_with_offsets([" the   sea"])
    assert {k for start, end in offsets for k in range(start, end)} == set(range(10))


def test_bos_only_if_the_tokenizer_adds_it():
    from tokenizers import processors

    inner = train_tokenizer(["a b"], vocab_size=270, bos_token=TURN_START)
    assert Tokenizer(inner).bos_id is None
    inner.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{TURN_START} $A", special_tokens=[(TURN_START, 1)]
    )
    tokenizer = Tokenizer(inner)
    assert tokenizer.bos_id == 1
    assert tokenizer.encode("a")[0] != 1


def test_default_template_is_reported_and_saved(tmp_path):
    tokenizer = Tokenizer(train_tokenizer(["a b"], vocab_size=270, chat_template=None))
    assert (tokenizer.template_source, tokenizer.differs_from_files) == ("chatml", True)
    assert save_tokenizer(tokenizer.inner, tmp_path) == [
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(TALK, tokenize=False).startswith("<|im_start|>")
    with pytest.raises(UsageError, match="neither a chat template nor an eos_token"):
        Tokenizer(train_tokenizer(["a"], vocab_size=260, special_tokens=("<x>",), eos_token="", pad_token="", chat_template=None))  # fmt: skip  # noqa: E501


def test_generation_marks():
    template = "{% for m in messages %}{{ m.role }}:{%- generation -%}{{ m.content }}{% endgeneration %};{% endfor %}"
    tokenizer = Tokenizer(train_tokenizer(["a"], vocab_size=260, chat_template=template))
    assert tokenizer.has_generation_marks
    text, spans = tokenizer.apply_marked_template(TALK)
    assert text == "user:hi;assistant:blue;"
    assert [text[a:b] for a, b in spans] == ["hi", "blue"]


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ raise_exception('no system turns') }}", DataError),
        ("{{ messages[7].content }}", DataError),
        ("{{ 1 / 0 }}", DataError),
        ("{% if %}", DataError),
        ("{{ ''.__class__.__mro__ }}", UnsafeInput),
    ],
)
def test_bad_templates(template, error):
    tokenizer = Tokenizer(train_tokenizer(["a"], vocab_size=260, chat_template=template))
    with pytest.raises(error, match="the chat template"):
        tokenizer.apply_chat_template(TALK)


def test_bad_folders(folder, tmp_path):
    with pytest.raises(MissingInput, match="no such model folder"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(MissingInput, match="no tokenizer files"):
        load_tokenizer(tmp_path)
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(DataError, match="the tokenizer cannot be read"):
        load_tokenizer(broken)
    code = tmp_path / "code"
    shutil.copytree(folder, code)
    (code / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}})
    )
    with pytest.raises(UnsafeInput, match="requires code from this folder"):
        load_tokenizer(code)


@pytest.mark.sweep  # every text of two files; test_tokenizer_kinds.py has the kind
def test_tokens_equal_sentencepiece(shared_data, tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece", reason="pip install sentencepiece protobuf")
    folder = shared_data / "llama2-tokenizer"
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (32000, 1, 2)
    assert (tokenizer.template_source, tokenizer.differs_from_files) == ("plain", True)
    reference = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    texts = [record["output"] for record in json.loads((shared_data / "alpaca_en_demo.json").read_text())]
    texts += [json.loads(line)["text"] for line in (shared_data / "c4_demo.jsonl").read_text().splitlines()]
    texts += ["  a   b\n\n   c\t d  ", " ", "", "日本 🙂 é", "    def f(x):\n        return x\n"]
    encoded = tokenizer.encode_batch(texts)
    assert [k for k, text in enumerate(texts) if encoded[k] != reference.encode(text)] == []
    save_tokenizer(tokenizer.inner, tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert saved.encode("a  b") == [1, *reference.encode("a  b")]
    assert load_tokenizer(tmp_path).encode_batch(texts) == encoded


def test_truncated_sentencepiece_is_refused(shared_data, tmp_path):
    pytest.importorskip("sentencepiece", reason="pip install sentencepiece protobuf")
    raw = (shared_data / "llama2-tokenizer" / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(raw[:-1000])
    with pytest.raises(DataError, match=r"tokenizer\.model: not a valid sentencepiece model"):
        load_tokenizer(tmp_path)
