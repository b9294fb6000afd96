"""A small Qwen3 model made on the spot: tokenizer trained on the given texts, random weights; for demos and tests.

Also the two things to do with a Hugging Face model at the end of a run: let it speak, and look at its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

from isthmus.data.chat.default_templates import CHATML
from isthmus.errors import NoSpace, UsageError
from isthmus.hf.tokenizer.tokenizer import save_tokenizer

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


def train_tokenizer(
    texts: Iterable[str],
    *,
    vocab_size: int = 4096,
    special_tokens: Sequence[str] = (END_OF_TEXT, TURN_START, TURN_END),
    eos_token: str = TURN_END,
    pad_token: str = END_OF_TEXT,
    bos_token: str | None = None,
    chat_template: str | None = CHATML,
) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer; the same texts give the same tokenizer.

    Raises:
        UsageError: ``vocab_size`` has no room for the 256 bytes and the special tokens.
    """
    smallest = 256 + len(special_tokens)
    if vocab_size < smallest:
        raise UsageError(f"vocab_size={vocab_size} cannot hold the bytes and special tokens. Use {smallest} or more.")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    names: dict[str, Any] = {"eos_token": eos_token, "pad_token": pad_token, "bos_token": bos_token}
    names["extra_special_tokens"] = [token for token in special_tokens if token not in names.values()]
    build: Callable[..., PreTrainedTokenizerBase] = PreTrainedTokenizerFast
    return build(
        tokenizer_object=backend,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        **{name: value for name, value in names.items() if value},
    )


def build_tiny_qwen3(
    folder: Path | str,
    texts: Iterable[str],
    *,
    vocab_size: int = 4096,
    hidden_size: int = 192,
    intermediate_size: int = 512,
    num_hidden_layers: int = 4,
    num_attention_heads: int = 6,
    num_key_value_heads: int = 2,
    head_dim: int = 32,
    max_position_embeddings: int = 1024,
    tie_word_embeddings: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Path:
    """Write a complete model folder: tokenizer, chat template, config, generation config, random weights.

    The embedding has as many rows as the tokenizer has tokens, which may be fewer than ``vocab_size`` when the texts
    are few.

    Raises:
        NoSpace: the folder exists and is not empty.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise NoSpace(f"{folder} exists already. Remove it or name another folder.")
    tokenizer = train_tokenizer(texts, vocab_size=vocab_size)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie_word_embeddings,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = Qwen3ForCausalLM(config)
        model.to(dtype)
    model.generation_config.do_sample = False
    with no_progress_bars():
        model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return folder


def generate(model_folder: Path | str, prompt: str | list[dict[str, Any]], *, max_new_tokens: int = 64) -> str:
    """What the model says to a prompt (text, or chat messages), always the likeliest token."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
    with no_progress_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(model_folder, local_files_only=True)
    if isinstance(prompt, str):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
    else:
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.inference_mode():
        out = model.eval().generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def logits(model_folder: Path | str, input_ids: torch.Tensor) -> torch.Tensor:
    """Logits of a Hugging Face model in float32: ids [B, S] -> [B, S, V]."""
    with no_progress_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, local_files_only=True)
    with torch.inference_mode():
        result: torch.Tensor = model.eval()(input_ids=input_ids).logits
    return result.float()


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Small files need no bars, and bars of several ranks would write over each other."""
    bars: Any = logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
