"""Supervised fine-tuning: chats in, loss on what the assistant says."""

from __future__ import annotations

from pathlib import Path

from isthmus.config.schema import RunConfig
from isthmus.data.store.sample_store import SampleStore
from isthmus.data.tokenize.tokenize_files import TokenizeStats, prepare_chat
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.recipes.run import RunResult
from isthmus.recipes.run import run as run_recipe


def prepare(config: RunConfig, tokenizer: Tokenizer, files: list[Path]) -> tuple[SampleStore, TokenizeStats]:
    """Chat records to samples, with a mask of what is learned."""
    store, report = prepare_chat(
        files,
        tokenizer,
        seq_length=config.data.seq_length,
        loss_on=config.data.loss_on,
        overlong=config.data.overlong,
        on_error=config.data.on_error,
        columns=config.data.columns,
    )
    if tokenizer.note is not None:
        report.notes.append(tokenizer.note)
    return store, report


def run(config: RunConfig) -> RunResult:
    """Fine-tune as ``config`` says; see :func:`isthmus.recipes.run.run` for the errors."""
    return run_recipe("sft", config, prepare)
