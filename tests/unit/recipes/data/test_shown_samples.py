"""Samples shown to a reader have the tokens and the loss mask of the batches that a run trains on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.config.load import dump, load_config
from isthmus.data.batching.batches import Batches, BatchSettings, DocumentEnds, PairBatches
from isthmus.data.chat.chat_records import Kind
from isthmus.data.chat.conversation_settings import UNCHANGED
from isthmus.data.readers.file_sources import find_sources
from isthmus.data.store.answer_views import AnswerEnd, ScoredSamples
from isthmus.data.tokenize.tokenize_records import TokenizeOptions
from isthmus.errors import DataError, MissingInput, UsageError
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from isthmus.recipes.data.data_sources import find_source
from isthmus.recipes.data.prepare import tokenize_files
from isthmus.recipes.data.recorded_data import open_recorded
from isthmus.recipes.data.shown_samples import ShownSample, shown_files, shown_step
from isthmus.recipes.run_dir import RunDir
from unit.data.tokenized import tokenized

CHATS = [
    [("user", "What is salt?"), ("assistant", "Salt — NaCl."), ("user", "And?"), ("assistant", "More 🌊 salt.")],
    [("user", "Hi"), ("assistant", "Hello")],
    [("user", "Nothing"), ("assistant", "")],
]
PAIRS = [("Hi", "Hello", "Go away"), ("Salt?", "NaCl", "No")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(["salt and more salt"], vocab_size=280), folder)
    return load_tokenizer(folder)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    turns = [[{"role": role, "content": text} for role, text in chat] for chat in CHATS]
    path.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    return path


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    records = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in PAIRS]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def shown(
    file: Path | str, tokenizer: Tokenizer, *, first: int = 0, count: int = 9, **options: Any
) -> list[ShownSample]:
    raw = {"kind": None, "columns": {}, "seq_length": None, "chat": UNCHANGED, **options}
    return list(
        shown_files(find_source("train", "data", "train", [str(file)]), tokenizer, first=first, count=count, **raw)
    )


def loss_text(sample: ShownSample) -> list[str]:
    return [part.text for part in sample.parts if part.has_loss]


def test_the_mask_is_that_of_the_packed_batches_of_a_run(chats: Path, tokenizer: Tokenizer) -> None:
    store, _ = tokenized("chat", [chats], tokenizer, 60)
    settings = BatchSettings(seq_length=60, micro_batch_size=2, global_batch_size=2, packing=True, seed=3)
    trained: dict[tuple[int, ...], tuple[int, ...]] = {}
    for batch in (batch for step in range(2) for batch in Batches(store, settings).step(step)):
        start = 0
        for length in batch.sample_lengths:
            span = slice(start, start + length)
            trained[tuple(batch.input_ids[span].tolist())] = tuple(batch.loss_mask[span].tolist())  # type: ignore[index]
            start += length
    samples = shown(chats, tokenizer, seq_length=60)
    assert {sample.input_ids[:-1]: sample.loss_mask[1:] for sample in samples} == trained
    assert [sample.name.rpartition(":")[2] for sample in samples] == ["1", "2", "3"]


def test_the_parts_are_the_text_and_the_answers_have_loss(chats: Path, tokenizer: Tokenizer) -> None:
    first, second, third = shown(chats, tokenizer)
    assert loss_text(first) == ["Salt — NaCl.<|im_end|>", "More 🌊 salt.<|im_end|>"]
    assert (loss_text(second), loss_text(third)) == (["Hello<|im_end|>"], ["<|im_end|>"])
    for sample in (first, second, third):
        assert "".join(part.text for part in sample.parts) == tokenizer.decode(sample.input_ids)
    assert loss_text(shown(chats, tokenizer, loss_on="last")[0]) == ["More 🌊 salt.<|im_end|>"]
    (last,) = shown(chats, tokenizer, first=2, count=1)
    assert last == third


def test_prepared_files_show_the_samples_of_their_records(chats: Path, pairs: Path, tokenizer: Tokenizer) -> None:
    for file, kind, count in ((chats, "chat", 3), (pairs, "preference", 4)):
        prefix = file.with_suffix("")
        prepare(file, prefix, kind, tokenizer)  # type: ignore[arg-type]
        raw, prepared = shown(file, tokenizer), shown(prefix, tokenizer)
        contents = [
            [(item.role, item.input_ids, item.loss_mask, item.parts) for item in side] for side in (raw, prepared)
        ]
        assert contents[0] == contents[1] and len(raw) == count
    assert [sample.role for sample in prepared] == ["chosen", "rejected"] * 2
    assert [loss_text(sample) for sample in prepared[2:]] == [["NaCl<|im_end|>"], ["No<|im_end|>"]]
    assert [sample.name for sample in shown(prefix, tokenizer, first=1)] == ["sample 1", "sample 1"]
    other = Tokenizer(train_tokenizer(["other words"], vocab_size=300))
    with pytest.raises(UsageError, match="prepared with another tokenizer"):
        shown(prefix, other)
    with pytest.raises(UsageError, match=r"no sample 2; it has 2\."):
        shown(prefix, tokenizer, first=2)
    with pytest.raises(UsageError, match="has 2 prepared data sets: "):
        shown(prefix.parent / "*.idx", tokenizer)


def prepare(file: Path, prefix: Path, kind: Kind, tokenizer: Tokenizer) -> None:
    tokenize_files(find_sources([file]), prefix, tokenizer, TokenizeOptions(kind), workers=1, method="spawn")


def test_a_record_without_a_sample_tells_why_and_a_bad_one_is_an_error(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "d.jsonl"
    answers = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]
    path.write_text(json.dumps({"messages": answers}) + '\n{"x": 1}\n')
    (sample,) = shown(path, tokenizer, count=1)
    assert str(sample) == f"{path}:1  no sample: 1 dropped without loss tokens"
    with pytest.raises(DataError, match=r"d\.jsonl:2: "):
        shown(path, tokenizer)
    with pytest.raises(UsageError, match="no record 2"):
        shown(path, tokenizer, first=2)
    path.write_text('{"text": "the sea"}\n{"text": "more"}\n')
    start, rest = shown(path, tokenizer, first=1)[0].parts
    assert (start.text + rest.text, start.has_loss, rest.has_loss) == ("more<|im_end|>", False, True)


def test_samples_of_several_documents_have_the_mask_of_the_batches(tokenizer: Tokenizer, chats: Path) -> None:
    store, _ = tokenized("chat", [chats], tokenizer, 60)
    eod = int(store[0][0][5])
    ends = DocumentEnds(eod=eod, reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=True)
    settings = BatchSettings(
        seq_length=90, micro_batch_size=3, global_batch_size=3, packing=False, shuffle=False, documents=ends
    )
    batches = Batches(store, settings)
    samples = list(shown_step(batches, 0, tokenizer.decode))
    (batch,) = batches.step(0)
    assert len(batch.sample_lengths) > len(samples) == 3
    assert [mask for sample in samples for mask in sample.loss_mask[1:]] == batch.loss_mask.tolist()  # type: ignore[union-attr]


def test_the_token_whose_score_a_reward_model_reads_is_marked(pairs: Path, tokenizer: Tokenizer) -> None:
    store, _ = tokenized("preference", [pairs], tokenizer, 60)
    scored = ScoredSamples(store, AnswerEnd(after=(5,)), most=60)
    settings = BatchSettings(seq_length=60, micro_batch_size=1, global_batch_size=1, packing=False, shuffle=False)
    chosen, rejected = shown_step(PairBatches(scored, settings), 0, tokenizer.decode)
    for number, sample in enumerate((chosen, rejected)):
        assert sample.input_ids == (*store[number][0].tolist(), 5)
        assert sample.loss_mask == (*[False] * (len(sample.input_ids) - 1), True)


@pytest.mark.slow
def test_a_run_folder_shows_its_samples_in_the_order_of_its_steps(
    tmp_path: Path, pairs: Path, tokenizer: Tokenizer
) -> None:
    run = RunDir(tmp_path / "run")
    with pytest.raises(MissingInput, match="is not a run folder"):
        open_recorded(run)
    run.data.mkdir(parents=True)
    prepare(pairs, run.data / "train", "preference", tokenizer)
    flags = {"model": str(tokenizer.folder), "data": [str(pairs)], "out": str(run.root)}
    config = load_config("dpo", None, ["train.global_batch_size=1", "data.valid_fraction=0", "train.steps=2"], flags)
    run.config.write_text(dump(config))
    pairs.unlink()  # the tokenized samples are enough
    samples = list(open_recorded(run).samples(0, 9))
    assert [sample.role for sample in samples] == ["chosen", "rejected"] * 2
    assert sorted(part for sample in samples for part in loss_text(sample)) == sorted(
        f"{answer}<|im_end|>" for _, *answers in PAIRS for answer in answers
    )
    assert [sample.name.partition(",")[0] for sample in samples] == ["step 1"] * 2 + ["step 2"] * 2
    assert list(open_recorded(run).samples(2, 1)) == samples[2:3]
    with pytest.raises(UsageError, match="no sample 4"):
        list(open_recorded(run).samples(4, 1))
    assert list(open_recorded(run).samples(0, 0)) == []
    assert isinstance(open_recorded(run).train, PairBatches)
    run.config.write_text(dump(config).replace(str(tokenizer.folder), "gone/away"))
    with pytest.raises(MissingInput, match="gone/away: no such model folder"):
        open_recorded(run)
