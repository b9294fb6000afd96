"""The tokenizer of a run: the model's own, another one, or the null tokenizer."""

from __future__ import annotations

from typing import Any

from isthmus.config.schema import RunConfig
from isthmus.errors import MissingInput, UsageError
from isthmus.hf.model_folder import ModelFolder, tokenizer_files
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.hf.tokenizer.tokenizer_kinds import NumberTokenizer, open_tokenizer
from isthmus.recipes.setup.model_source import local_folder


def run_tokenizer(config: RunConfig, source: ModelFolder, vocab_size: int) -> Tokenizer:
    """Open the tokenizer, by default the model's, and check that it has at most ``vocab_size`` tokens.

    Mock data without a tokenizer uses the null tokenizer.
    """
    tokenizer = _open(config, source, vocab_size)
    if tokenizer.vocab_size > vocab_size and not config.data.mock:  # mock data has the model's tokens only
        last = tokenizer.inner.convert_ids_to_tokens(tokenizer.vocab_size - 1)
        raise UsageError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the last of them {last!r}, and the model's embedding "
            f"{vocab_size} rows ({source}). Use the tokenizer that belongs to the model, or with model.init=random set "
            f"model.config.vocab_size={tokenizer.vocab_size}."
        )
    return tokenizer


def named_tokenizer(named: str, kind: str | None, *, trust_remote_code: bool = False) -> Tokenizer:
    """Open a tokenizer: a folder, a sentencepiece file, or an id on the Hub."""
    folder = local_folder(named, weights=False, code=trust_remote_code)
    return open_tokenizer(folder, kind, trust_remote_code=trust_remote_code)


def _open(config: RunConfig, source: ModelFolder, vocab_size: int) -> Tokenizer:
    settings, code = config.tokenizer, config.model.trust_remote_code
    if settings.type == "NullTokenizer":
        assert settings.vocab_size is not None
        if config.recipe != "pretrain" and not config.data.mock:
            raise UsageError(f"NullTokenizer reads numbers, and {config.recipe} trains on chats. Leave it out.")
        return NumberTokenizer(settings.vocab_size)
    if settings.path is not None:
        return named_tokenizer(settings.path, settings.type, trust_remote_code=code)
    if tokenizer_files(source.path):
        return open_tokenizer(source.path, settings.type, trust_remote_code=code)
    if config.data.mock and settings.type is None:
        return NumberTokenizer(vocab_size - 1)
    raise MissingInput(f"{source} has no tokenizer. Set one with tokenizer.path: a folder, or an id on the Hub.")


def with_tokens_of(tokenizer: Tokenizer, hf_config: dict[str, Any]) -> dict[str, Any]:
    """``hf_config`` with the BOS, EOS and padding tokens of ``tokenizer``, unless it has them already."""
    inner, changed = tokenizer.inner, dict(hf_config)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        old, new = hf_config.get(name), getattr(inner, name)
        if new not in (old if isinstance(old, list) else [old]):
            changed[name] = new
    return changed
