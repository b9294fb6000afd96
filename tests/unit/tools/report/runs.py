"""Run folders with hostile text in every file that a report reads."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from isthmus.config.load import dump, load_config
from isthmus.data.readers.file_sources import find_sources
from isthmus.data.tokenize.tokenize_records import TokenizeOptions
from isthmus.files.file_checksums import write_checksums
from isthmus.hf.tokenizer.tokenizer import load_tokenizer
from isthmus.recipes.data.prepare import tokenize_files
from isthmus.recipes.run_dir import ENVIRONMENT, RunDir

HOSTILE = "</script><script>hack()</script><img src=x onerror=hack()> \"' {{ 7 * 7 }}"
STEPS = 60
PROFILE = f"""# Rank 0, steps 3-5

A step took 12 ms. {HOSTILE}

| what | ms a step | share | calls a step | allocates GiB a step |
| --- | ---: | ---: | ---: | ---: |
| attention | 6.000 | 50.0% | 4 | 0.1000 |
| {HOSTILE} | 3.000 | 25.0% | 4 | 0.1000 |
| total | 9.000 | 75.0% | | |

| memory | GiB |
| --- | ---: |
| weights | 1.5000 |
"""


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def step_row(step: int, scale: float) -> dict[str, Any]:
    row = {"step": step, "loss": 3 * scale * math.exp(-step / 30) + 1, "lr": 1e-3, "grad_norm": 1.0, "mfu": 0.4}
    row |= {"tokens_per_s": 5000.0, "memory_gib": 1.5, "step_time_s": 0.5, "num_tokens": 900, "padding": 0.0}
    row |= {"moe_load_max_over_mean": 1.2, "rewards/margins": 0.1 * step, "consumed_sequences": 4 * step}
    row |= {"slowest_rank_s": 0.4} if step % 10 == 0 else {}
    return row | {HOSTILE: 1.0, "loss": None if step == 20 else row["loss"]}


def make_run(folder: Path, tokenizer: Path, *, lr: float = 1e-3, scale: float = 1.0) -> RunDir:
    """The folder of a finished run: 60 steps, 3 chats of data, a profile, an export."""
    run = RunDir(folder)
    run.data.mkdir(parents=True)
    chats = folder / "chats.jsonl"
    turns = [("user", f"Say {HOSTILE}"), ("assistant", f"Answer {HOSTILE}")]
    write_lines(chats, 3 * [{"messages": [{"role": role, "content": text} for role, text in turns]}])
    options = TokenizeOptions("chat", seq_length=400)
    opened = load_tokenizer(tokenizer)
    tokenize_files(find_sources([chats]), run.data / "train", opened, options, workers=1, method="spawn")
    flags = {"model": str(tokenizer), "data": [str(chats)], "out": str(folder)}
    settings = [f"optim.lr={lr}", "data.seq_length=400", "train.global_batch_size=2", "data.valid_fraction=0"]
    run.config.write_text(dump(load_config("sft", None, [*settings, f"logging.name={json.dumps(HOSTILE)}"], flags)))
    rows = [step_row(step, scale) for step in range(1, STEPS + 1)]
    rows += [{"step": step, "valid_loss": 3.0 - step / 60} for step in range(0, STEPS + 1, 20)]
    write_lines(folder / "metrics.jsonl", rows)
    events = [{"step": 30, "event": "resume", "text": HOSTILE}, {"step": 60, "event": "checkpoint", "text": "saved"}]
    write_lines(folder / "events.jsonl", events)
    write_lines(folder / "samples.jsonl", [{"step": 60, "prompt": HOSTILE, "answer": HOSTILE}])
    (folder / ENVIRONMENT).write_text(json.dumps({"torch": "2.13.0", HOSTILE: HOSTILE}))
    (folder / "profile").mkdir()
    (folder / "profile" / "rank0.md").write_text(PROFILE)
    run.export().mkdir()
    (run.export() / "model.safetensors").write_bytes(b"weights")
    write_checksums(run.export())
    return run
