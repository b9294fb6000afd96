"""Pretraining, from random or given weights: documents in, loss on every token."""

from __future__ import annotations

from pathlib import Path

from isthmus.config.schema import RunConfig
from isthmus.data.store.sample_store import SampleStore
from isthmus.data.tokenize.tokenize_files import TokenizeStats, prepare_text
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.recipes.run import RunResult
from isthmus.recipes.run import run as run_recipe


def prepare(config: RunConfig, tokenizer: Tokenizer, files: list[Path]) -> tuple[SampleStore, TokenizeStats]:
    """Documents to samples, every token a target."""
    data = config.data
    return prepare_text(files, tokenizer, seq_length=data.seq_length, on_error=data.on_error, columns=data.columns)


def run(config: RunConfig) -> RunResult:
    """Pretrain as ``config`` says; see :func:`isthmus.recipes.run.run` for the errors."""
    return run_recipe("pretrain", config, prepare)
