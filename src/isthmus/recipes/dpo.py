"""Direct preference optimization: pairs of answers in, loss on how much more the better one gains than the worse."""

from __future__ import annotations

from pathlib import Path

from isthmus.config.schema import RunConfig
from isthmus.data.store.sample_store import SampleStore
from isthmus.data.tokenize.tokenize_files import TokenizeStats, prepare_pairs
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.recipes.run import RunResult
from isthmus.recipes.run import run as run_recipe


def prepare(config: RunConfig, tokenizer: Tokenizer, files: list[Path]) -> tuple[SampleStore, TokenizeStats]:
    """Preference records to samples, two a pair, with a mask of the answers."""
    store, report = prepare_pairs(
        files,
        tokenizer,
        seq_length=config.data.seq_length,
        overlong=config.data.overlong,
        on_error=config.data.on_error,
        columns=config.data.columns,
    )
    if tokenizer.note is not None:
        report.notes.append(tokenizer.note)
    return store, report


def run(config: RunConfig) -> RunResult:
    """Train on preferences as ``config`` says; see :func:`isthmus.recipes.run.run` for the errors."""
    return run_recipe("dpo", config, prepare)
