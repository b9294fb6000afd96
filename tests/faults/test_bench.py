"""``isthmus bench`` measures real runs, continues, and refuses what it cannot do."""

from __future__ import annotations

import json
from pathlib import Path

from faults.command import CompletedCommand
from faults.fork_server import ForkServer
from isthmus.config.load import load_config


def test_grid_is_measured_and_continued(isthmus: ForkServer, model: Path, tmp_path: Path) -> None:
    words = ["bench", "--model", model, "--out", tmp_path / "out", "--steps", "3", "--warmup", "1", "--recipe", "sft"]
    words += ["data.seq_length=32", "train.global_batch_size=4", "platform=cpu"]

    def bench(*more: str) -> CompletedCommand:
        return isthmus(*words, *more)

    first = bench("train.micro_batch_size=2,3", "--json")
    outcome = first.result
    measured, refused = outcome["cells"]
    assert measured["status"] == "ok" and len(measured["step_times_s"]) == 3
    assert round(measured["tokens_per_s"] * measured["step_time_s"]) == 128  # 4 sequences of 32 tokens
    assert 0.1 < measured["memory_gib"] < 8
    assert refused["status"] == "refused" and "is not a multiple of micro_batch_size=3" in refused["reason"]
    environment = outcome["certificate"]["environment"]
    assert (
        environment["platform"] == "cpu"
        and "logical cores" in environment["device"]
        and environment["torch"]
        and environment["OMP_NUM_THREADS"] == "1"
    )
    (best,) = outcome["best"]
    config = load_config("sft", Path(best["file"]), ["data.mock=true", "train.steps=1", "out=x"])
    assert config.train.micro_batch_size == 2 and config.model.path == str(model)

    again = bench("train.micro_batch_size=2,4")
    assert again.returncode == 0 and "(recorded)" in again.stderr and "2/2" in again.stderr
    assert "train.micro_batch_size" in again.stdout and "best, in" in again.stdout
    rows = json.loads((tmp_path / "out/bench.json").read_text())["cells"]
    assert [row["varied"] for row in rows] == [["train.micro_batch_size=2"], ["train.micro_batch_size=4"]]
