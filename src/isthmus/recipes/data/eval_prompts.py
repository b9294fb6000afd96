"""The prompts of ``eval.generate``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.config.schema import RunConfig
from isthmus.data.chat.chat_text import ChatRenderer
from isthmus.data.chat.message_normalization import Message, turns
from isthmus.errors import DataError, MissingInput, UsageError
from isthmus.families.architecture import Architecture
from isthmus.files.input_files import parse_json, read_bytes
from isthmus.hf.model_folder import ModelFolder
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.recipes.data.data_sources import chat_settings
from isthmus.recipes.registry import recipe_of

_LONGEST_LINE = 100


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    text: str
    """The prompt; of messages, the last one."""
    input_ids: list[int]


def end_tokens(source: ModelFolder, tokenizer: Tokenizer) -> set[int]:
    """Tokens that end an answer: those of the model's files, as in transformers, and the tokenizer's."""
    return source.end_tokens() | {end for end in (tokenizer.eos_id, tokenizer.turn_end_id) if end is not None}


def check_end_tokens(source: ModelFolder, tokenizer: Tokenizer) -> None:
    """Raise UsageError if no token would end an answer."""
    if not end_tokens(source, tokenizer):
        raise UsageError(
            "neither the tokenizer nor the model has an end token (eos_token), so no answer would end. Set one in "
            "tokenizer_config.json."
        )


def eval_prompts(config: RunConfig, tokenizer: Tokenizer, architecture: Architecture) -> tuple[EvalPrompt, ...]:
    """The prompts, rendered with the chat template except in pretraining; none without ``eval.generate``.

    Raises:
        MissingInput, DataError: the file does not exist, or a line has no prompt.
        UsageError: prompt and answer are longer than the model's positions.
    """
    settings = config.eval
    if not settings.generate:
        return ()
    prompts_setting = settings.prompts
    records = (
        _read(Path(prompts_setting))
        if isinstance(prompts_setting, str)
        else [(text, "eval.prompts") for text in prompts_setting]
    )
    render = None if recipe_of(config).records.is_text else ChatRenderer(tokenizer, settings=chat_settings(config))
    prompts = tuple(_prompt(record, where, render, tokenizer) for record, where in records)
    longest = max(len(prompt.input_ids) for prompt in prompts) + settings.max_new_tokens
    if architecture.embedding.position == "learned" and longest > architecture.max_position_embeddings:
        raise UsageError(
            f"eval.prompts: a prompt and eval.max_new_tokens={settings.max_new_tokens} are {longest} tokens, more than "
            f"the {architecture.max_position_embeddings} learned positions of this model. Lower eval.max_new_tokens."
        )
    return prompts


def _read(path: Path) -> list[tuple[Any, str]]:
    """The prompts of a file with their places; texts, or objects."""
    if not path.is_file():
        raise MissingInput(f"eval.prompts={path} is no file. Give a file, or a list: eval.prompts='[first, second]'.")
    try:
        lines = read_bytes(path).decode("utf-8").split("\n")  # JSON may have other line separators in a text
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason}). Convert it.") from error
    prompts = [(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise DataError(f"{path} has no prompts. Write one per line.")
    if path.suffix != ".jsonl":
        return list(prompts)
    try:
        return [(parse_json(line), where) for line, where in prompts]
    except ValueError as error:
        raise DataError(f"{path} has a line that is not JSON ({error}). Correct it, or name the file .txt.") from error


def _prompt(record: Any, where: str, render: ChatRenderer | None, tokenizer: Tokenizer) -> EvalPrompt:
    """``render`` is None for text to continue."""
    content = record.get("messages", record.get("prompt")) if isinstance(record, dict) else record
    if not content or not isinstance(content, str | list):
        raise DataError(
            f"{where}: expected text, or an object with prompt or messages, got {record!r:.{_LONGEST_LINE}}."
        )
    if render is None:
        if not isinstance(content, str):
            raise DataError(f"{where}: pretrain continues text, and this prompt is a chat. Give its text as prompt.")
        first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        ids = first + tokenizer.encode(content)
        if not ids:
            raise DataError(f"{where}: the prompt has no tokens. Give a longer text.")
        return EvalPrompt(content, ids)
    messages: list[Message] = turns(content, where) if isinstance(content, list) else []
    messages = messages or [{"role": "user", "content": str(content)}]
    return EvalPrompt(str(messages[-1]["content"]), tokenizer.encode(render.prompt(messages)))
