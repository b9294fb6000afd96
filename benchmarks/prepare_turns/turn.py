"""Runs one contestant of the tokenization benchmark."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rounds import CpuWatch, peak_rss_gib, turn_files

_AT_ONCE = 8192


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Tokenize. The clock stops when the result is returned, or on disk for contestants that write files.

    It starts with all modules imported, except for whole commands, whose start-up is measured too.
    """
    threads = int(spec["threads"])
    os.environ |= {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
    prepared = _CONTESTANTS[spec["contestant"]](spec, threads)
    watch, started_s = CpuWatch(), time.perf_counter()
    tokens = prepared()
    time_s = time.perf_counter() - started_s
    workers_gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    return watch.shares() | {
        "time_s": time_s,
        "tokens": tokens,
        "tokens_per_s": tokens / time_s,
        "peak_rss_gib": peak_rss_gib(),
        "largest_child_rss_gib": workers_gib,
        "line": f"{time_s:7.2f} s  {tokens / time_s / 1e6:.3f} M tokens/s",
    }


def _encode_batch(spec: dict[str, Any], threads: int) -> Callable[[], int]:
    """``tokenizers`` alone, on texts in memory, with templates applied before the clock starts."""
    from tokenizers import Tokenizer

    from isthmus.data.chat.chat_records import parse_record
    from isthmus.data.chat.chat_text import ChatRenderer
    from isthmus.data.readers.file_formats import chunk_records, read_chunks
    from isthmus.hf.tokenizer.tokenizer import load_tokenizer

    opened = load_tokenizer(spec["tokenizer"])
    records = (parse_record(record) for chunk in read_chunks([spec["data"]]) for record in chunk_records(chunk))
    render = ChatRenderer(opened)
    texts = [item if isinstance(item, str) else render(item)[0].text for item in records]
    backend = Tokenizer.from_str(opened.inner.backend_tokenizer.to_str())

    def encode() -> int:
        count = 0
        for at in range(0, len(texts), _AT_ONCE):
            encoded = backend.encode_batch(texts[at : at + _AT_ONCE], add_special_tokens=False)
            count += sum(map(len, encoded))
        return count

    return encode


def _isthmus(spec: dict[str, Any], threads: int) -> Callable[[], int]:
    """``prepare``: reads, hashes and writes files, loads the tokenizer and starts workers."""
    from isthmus.recipes.data.prepare import prepare

    def run() -> int:
        return prepare([spec["data"]], spec["out"], spec["tokenizer"], workers=threads).stats.tokens

    return run


def _isthmus_command(spec: dict[str, Any], threads: int) -> Callable[[], int]:
    args = ["isthmus", "prepare", spec["data"], spec["out"], "--tokenizer", spec["tokenizer"]]
    return _command([sys.executable, "-m", *args, "--workers", str(threads)], spec["out"])


def _megatron_lm(spec: dict[str, Any], threads: int) -> Callable[[], int]:
    script = Path(os.environ["MEGATRON_LM"]) / "tools" / "preprocess_data.py"
    args = ["--input", spec["data"], "--output-prefix", spec["out"], "--append-eod", "--workers", str(threads)]
    args += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", spec["tokenizer"]]
    return _command(
        [sys.executable, "-m", "prepare_turns.megatron_lm", str(script), *args], spec["out"] + "_text_document"
    )


def _command(args: list[str], prefix: str) -> Callable[[], int]:
    def run() -> int:
        done = subprocess.run(args, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{args} failed with code {done.returncode}:\n{done.stderr[-4000:]}")
        from isthmus.data.store.indexed_dataset import open_indexed

        return len(open_indexed(prefix).tokens)

    return run


def _trl(spec: dict[str, Any], threads: int) -> Callable[[], int]:
    """The dataset preparation of ``SFTTrainer``; the dataset is loaded before the clock starts."""
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # it uses processes instead
    tokenizer = AutoTokenizer.from_pretrained(spec["tokenizer"])
    data = Dataset.from_json(spec["data"], cache_dir=spec["out"])
    config = SFTConfig(
        output_dir=spec["out"], max_length=None, dataset_num_proc=threads, report_to=[], use_cpu=True, bf16=False
    )
    trainer: Any = object.__new__(SFTTrainer)
    trainer._tokenizer, trainer.chat_template = tokenizer, tokenizer.chat_template
    trainer.completion_only_loss = True

    def run() -> int:
        prepared = trainer._prepare_dataset(data, tokenizer, config, False, None, "train")
        return sum(prepared.map(lambda row: {"n": len(row["input_ids"])}, remove_columns=prepared.column_names)["n"])

    return run


_CONTESTANTS = {
    "encode-batch": _encode_batch,
    "isthmus": _isthmus,
    "isthmus-command": _isthmus_command,
    "megatron-lm": _megatron_lm,
    "trl": _trl,
}

if __name__ == "__main__":
    spec, result_file = turn_files()
    Path(result_file).write_text(json.dumps(run(spec)))
