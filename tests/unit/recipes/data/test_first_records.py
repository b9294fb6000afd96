"""What is known of data before it is tokenized."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.config.schema import RunConfig
from isthmus.config.schema.grpo import RolloutConfig
from isthmus.data.batching.batches import BatchSettings
from isthmus.data.batching.rollout_batches import PromptBatches
from isthmus.data.readers import json_chunks
from isthmus.data.readers.file_formats import read_chunks
from isthmus.data.readers.file_sources import find_sources
from isthmus.data.store.sample_store import SampleStore
from isthmus.data.tokenize.tokenize_records import RecordTokenizer
from isthmus.errors import DataError
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.recipes.data import first_records
from isthmus.recipes.data.corpus import tokenize_options
from isthmus.recipes.data.data_sources import data_settings
from isthmus.recipes.data.first_records import check_first_records, estimate_data, known_corpus
from isthmus.recipes.data.prepare import tokenize_files

CHATS = [
    {"prompt": f"Say the number {number}. " * (1 + number % 5), "completion": f"It is {number}. " * (1 + number % 7)}
    for number in range(600)
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (json_chunks, first_records):
        monkeypatch.setattr(module, "CHUNK_BYTES", 1 << 14)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(train_tokenizer(["Say the number 1234567890. It is " * 9], vocab_size=300))


def config(files: list[Path | str], recipe: str = "sft", **data: Any) -> RunConfig:
    values = {"files": [*map(str, files)], "seq_length": 256, "valid_fraction": 0.0} | data
    return RunConfig.model_validate(
        {"recipe": recipe, "out": "o", "model": {"path": "m"}, "data": values, "train": {"global_batch_size": 4}}
    )


@pytest.mark.processes
def test_an_estimate_of_raw_files_and_the_size_of_prepared_ones(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The file has several chunks; the first records are a bit shorter than the others."""
    lines, array, packed = tmp_path / "chats.jsonl", tmp_path / "chats.json", tmp_path / "packed.jsonl.gz"
    lines.write_text("\n".join(map(json.dumps, CHATS)))
    array.write_text(json.dumps(CHATS, indent=1))
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    messages: list[str] = []
    raw = config([lines])
    tokenize_files(
        find_sources([lines]), tmp_path / "prepared", tokenizer, tokenize_options(data_settings(raw)), workers=1
    )
    prepared = known_corpus(config([tmp_path / "prepared"]), tokenizer, vocab_size=300, report=messages.append)
    assert prepared is not None and "600 samples" in messages[0]
    tokens = prepared.train.lengths.sum() - len(prepared.train)
    for file in (lines, array):
        assert known_corpus(config([file]), tokenizer, vocab_size=300, report=messages.append) is None
        estimate = estimate_data(config([file]), tokenizer, messages.append)
        assert estimate is not None and estimate.tokens == pytest.approx(tokens, rel=0.1)
        assert estimate.sequences * 256 == pytest.approx(tokens, rel=0.15)
        unpacked = estimate_data(config([file], packing=False, valid_fraction=0.5), tokenizer, messages.append)
        assert unpacked is not None and unpacked.sequences == pytest.approx(300, rel=0.1)
        first = estimate_data(config([file], packing=False, max_samples=60), tokenizer, messages.append)
        assert first is not None and first.sequences == pytest.approx(60, rel=0.05)
    assert estimate_data(config([packed]), tokenizer, messages.append) is None
    assert estimate_data(config([lines, "hf:org/name"]), tokenizer, messages.append) is None
    assert messages[-2] == "data: hf:org/name is not checked here: the run downloads it"
    assert messages[-1].startswith("data: 1 file, the first records: ")


def test_generated_answers_count_as_long_as_possible(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": chat["prompt"]}) for chat in CHATS[:40]))
    rollout = RolloutConfig(reward=["exact_match"], group_size=4, max_new_tokens=100)
    settings = config([file]).model_copy(update={"recipe": "grpo", "rollout": rollout})
    estimate = estimate_data(settings, tokenizer, [].append)
    (chunk,) = read_chunks([str(file)])
    lengths = RecordTokenizer(tokenizer, tokenize_options(data_settings(settings)))(chunk).lengths
    store = SampleStore.from_samples([([1] * length, [1] * length) for length in lengths])
    assert estimate is not None and estimate.sequences == 160
    sizes = BatchSettings(seq_length=256, micro_batch_size=4, global_batch_size=8, packing=False)
    training = PromptBatches(store, sizes, group_size=4, answer_tokens=100).tokens_per_step / 8
    assert estimate.tokens / estimate.sequences == pytest.approx(training)
    assert training == pytest.approx(lengths.mean() - 1 + 100)


def test_text_is_not_read_as_a_whole(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    line = "Say the number 1. It is \u00e9.\n"
    text.write_text(line * 2000)
    estimate = estimate_data(config([text], "pretrain"), tokenizer, [].append)
    tokens = 20 * len(tokenizer.encode(line * 100))
    assert estimate is not None and estimate.tokens == pytest.approx(tokens, rel=0.01)
    assert estimate.sequences == pytest.approx(tokens / 256, rel=0.02)


def test_the_first_records_of_every_file_are_rendered(tokenizer: Tokenizer, tmp_path: Path) -> None:
    good, bad, wrong = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.jsonl"
    good.write_text("\n".join(map(json.dumps, CHATS[:20])))
    check_first_records(config([good]), tokenizer)
    bad.write_text(json.dumps(CHATS[0]) + "\nno JSON\n")
    wrong.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}))
    for file, message in ((bad, "b.jsonl:2: not JSON"), (wrong, "a preference pair among data of kind chat")):
        with pytest.raises(DataError, match=message):
            check_first_records(config([good, file]), tokenizer)
    check_first_records(config([good, bad], on_error="skip"), tokenizer)
    later = tmp_path / "later.jsonl"  # only a run that tokenizes the whole file can find it
    later.write_text("\n".join(map(json.dumps, CHATS[:20])) + "\nno JSON\n")
    check_first_records(config([later]), tokenizer)
