"""Runs on prepared datasets and on mixtures of datasets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from faults.command import rows
from faults.fork_server import ForkServer
from isthmus.data.store.indexed_dataset import IndexedWriter, open_indexed, write_manifest
from isthmus.hf.tokenizer.tokenizer import load_tokenizer
from isthmus.recipes.data.data_sources import tokenizer_record


@pytest.fixture
def texts(tmp_path: Path, model: Path) -> Path:
    """The same documents as a JSON Lines file and as an indexed dataset ``texts``."""
    tokenizer = load_tokenizer(model)
    texts = [f"The number is {number}. " * (number % 5 + 1) for number in range(60)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with IndexedWriter(tmp_path / "texts", np.uint16) as writer:
        for text in texts:
            writer.add([*tokenizer.encode(text), tokenizer.eos_id])
            writer.end_document()
    write_manifest(
        tmp_path / "texts", {"kind": "text", "tokenizer": tokenizer_record(tokenizer), "pair": writer.close()}
    )
    return tmp_path / "texts"


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in rows(out) if "loss" in row]


def test_prepared_dataset_trains_as_raw_files(isthmus: ForkServer, model: Path, texts: Path, tmp_path: Path) -> None:
    args = ["pretrain", "--model", model, "--json", "data.seq_length=16", "train.global_batch_size=4", "train.steps=3"]
    for name, data in (("raw", f"{texts}.jsonl"), ("prepared", texts)):
        isthmus(*args, "--data", data, "--out", tmp_path / name)
    assert losses(tmp_path / "raw") == losses(tmp_path / "prepared")
    assert not list((tmp_path / "prepared" / "data").glob("*.bin"))
    (tmp_path / "texts.json").unlink()  # as written by Megatron-LM
    isthmus(*args, "--data", f"{texts}.bin", "--out", tmp_path / "bare")
    assert losses(tmp_path / "bare") == losses(tmp_path / "raw")
    wrong = isthmus("sft", *args[1:], "--data", texts, "--out", tmp_path / "sft").error(65)
    assert "sft needs chat" in wrong and not (tmp_path / "sft").exists()
    texts.with_suffix(".bin").write_bytes(texts.with_suffix(".bin").read_bytes()[:-2])
    assert "texts.bin" in isthmus(*args, "--data", texts, "--out", tmp_path / "cut").error(65)


def test_mixture_splits_each_set_and_resumes(
    isthmus: ForkServer, sft_args: list[str], chats: Path, tmp_path: Path
) -> None:
    few = tmp_path / "few.json"
    few.write_text(json.dumps(json.loads(chats.read_text())[:8]))
    args = ["sft", *sft_args[1:3], *sft_args[5:]]
    mix = [
        f"data.sets={{many: {{files: {chats}, weight: 3}}, few: {{files: {few}, weight: 1}}}}",
        *("data.valid_fraction=0.2", "data.test_fraction=0.2", "data.packing=false", "checkpoint.every=6"),
    ]
    completed = isthmus(*args, *mix, "train.steps=8")
    # 32 sequences: 24 of the 38 training sequences of many, 8 of the 4 of few.
    assert "epochs of each set in 8 steps: many 0.63, few 2.00" in completed.stderr
    full = losses(tmp_path / "out")
    checkpoints = tmp_path / "out" / "checkpoints"
    shutil.rmtree(checkpoints / "iter_0000008")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("6")
    (checkpoints / "latest_checkpointed_iteration.json").unlink()  # its copy, which protects it from damage
    assert isthmus(*args, *mix, "train.steps=8").returncode == 0
    assert losses(tmp_path / "out")[-2:] == full[6:]
    other = [word.replace("weight: 3", "weight: 2") for word in mix]
    assert "differ from those of" in isthmus(*args, *other, "train.steps=9").error(65)
    assert open_indexed(tmp_path / "out" / "data" / "set-0", verify=True).mask is not None
