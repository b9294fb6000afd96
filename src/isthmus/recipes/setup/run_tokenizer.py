"""The tokenizer of a run: the model's own, another one, or numbers."""

from __future__ import annotations

from typing import Any

from isthmus.config.schema import RunConfig
from isthmus.errors import MissingInput, UsageError
from isthmus.hf.model_folder import ModelFolder, tokenizer_files
from isthmus.hf.tokenizer.null_tokenizer import NumberTokenizer
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.hf.tokenizer.tokenizer_kinds import open_tokenizer
from isthmus.recipes.setup.model_source import local_folder


def run_tokenizer(config: RunConfig, source: ModelFolder, vocab_size: int) -> Tokenizer:
    """Open what ``tokenizer`` says, and see that the model has a row for each of its tokens.

    Args:
        config: of the run. With mock data and no tokenizer anywhere it is one of numbers.
        source: the model, whose own tokenizer is taken when no other is named.
        vocab_size: rows of its embedding.

    Raises:
        MissingInput, DataError, UnsafeInput, IOFailure: it is absent or damaged.
        UsageError: it is of another kind than ``tokenizer.type``, or has more tokens than the model has rows.
    """
    tokenizer = _open(config, source, vocab_size)
    if tokenizer.vocab_size > vocab_size and not config.data.mock:  # which is made up of the model's own tokens
        last = tokenizer.inner.convert_ids_to_tokens(tokenizer.vocab_size - 1)
        raise UsageError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the last of them {last!r}, and the model's embedding "
            f"{vocab_size} rows ({source}). Use the tokenizer that belongs to the model, or with model.init=random set "
            f"model.config.vocab_size={tokenizer.vocab_size}."
        )
    return tokenizer


def named_tokenizer(named: str, kind: str | None, *, trust_remote_code: bool = False) -> Tokenizer:
    """Open a tokenizer by itself: a folder, a sentencepiece file, or an id on the Hub.

    Raises:
        MissingInput, DataError, UnsafeInput, IOFailure: it is absent or damaged, or the Hub cannot be reached.
        UsageError: it is of another kind than ``kind``.
    """
    folder = local_folder(named, weights=False, code=trust_remote_code)
    return open_tokenizer(folder, kind, trust_remote_code=trust_remote_code)


def _open(config: RunConfig, source: ModelFolder, vocab_size: int) -> Tokenizer:
    said, code = config.tokenizer, config.model.trust_remote_code
    if said.type == "NullTokenizer":
        assert said.vocab_size is not None
        if config.recipe != "pretrain" and not config.data.mock:
            raise UsageError(f"NullTokenizer reads numbers, and {config.recipe} learns from chats. Leave it out.")
        return NumberTokenizer(said.vocab_size)
    if said.path is not None:
        return named_tokenizer(said.path, said.type, trust_remote_code=code)
    if tokenizer_files(source.path):
        return open_tokenizer(source.path, said.type, trust_remote_code=code)
    if config.data.mock and said.type is None:
        return NumberTokenizer(vocab_size - 1)
    raise MissingInput(f"{source} brings no tokenizer. Give one with tokenizer.path: a folder, or an id on the Hub.")


def with_tokens_of(tokenizer: Tokenizer, hf_config: dict[str, Any]) -> dict[str, Any]:
    """The config with the tokens of ``tokenizer`` that begin, end and pad a text, unless it has them already."""
    inner, changed = tokenizer.inner, dict(hf_config)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        said, now = hf_config.get(name), getattr(inner, name)
        if now not in (said if isinstance(said, list) else [said]):
            changed[name] = now
    return changed
