"""Small models with random weights, built and run by transformers, and tokenizers trained on given texts.

The demo and tests use a Qwen3 model; the mapping of an unsupported model type is inferred from a model of its config.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers import __version__ as transformers_version
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging

from isthmus.data.chat.template_capabilities import CHATML
from isthmus.errors import OutputExists, UsageError
from isthmus.hf.tensors.safetensors_format import SINGLE_FILE
from isthmus.hf.tokenizer.tokenizer import save_tokenizer

VERSION: str = transformers_version
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen's tokenizer splits text before BPE: a word keeps the space, dot or other character before it."""
_SIZES = {
    **{"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "max_position_embeddings": 1024},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True},
}
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
    pattern: str | None = None,
) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer; the same texts give the same tokenizer.

    ``pattern`` is the regular expression that splits text before BPE, by default that of GPT-2.
    """
    smallest = 256 + len(special_tokens)
    if vocab_size < smallest:
        raise UsageError(f"vocab_size={vocab_size} is too small for bytes and special tokens. Use {smallest} or more.")
    backend = Backend(models.BPE())
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes]) if splits else to_bytes
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
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    pattern: str | None = None,
    scaled_init: bool = False,
    **config_keys: Any,
) -> Path:
    """Write a complete model folder: tokenizer, chat template, config, generation config, random weights.

    The embedding has one row per token of the tokenizer, which can be fewer than ``vocab_size`` if the texts are short.
    ``scaled_init`` initializes weights by their fan-in, with small outputs of each layer, for short training.
    ``config_keys`` override the sizes of the config.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputExists(f"{folder} exists already. Remove it or choose another folder.")
    tokenizer = train_tokenizer(texts, vocab_size=vocab_size, pattern=pattern)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **(_SIZES | config_keys),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = Qwen3ForCausalLM(config)
        if scaled_init:
            _scale_weights(model)
        model.to(dtype)
    model.generation_config.do_sample = False
    with no_progress_bars():
        model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return folder


@torch.no_grad()
def _scale_weights(model: Any) -> None:
    for name, weight in model.named_parameters():
        if "embed_tokens" in name:
            weight.normal_(0.0, 0.1)
        elif weight.dim() == 2:
            is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
            weight.normal_(0.0, (0.2 if is_output else 1.0) / weight.shape[1] ** 0.5)


def generate(
    model_folder: Path | str,
    prompts: Sequence[str | list[dict[str, str]]],
    *,
    max_new_tokens: int = 64,
    batch_size: int = 50,
) -> list[str]:
    """Greedy completions by transformers; a prompt is text, or chat messages."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder, local_files_only=True, padding_side="left")
    with no_progress_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(model_folder, local_files_only=True).eval()
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    answers: list[str] = []
    for start in range(0, len(prompts), batch_size):
        texts = [
            prompt
            if isinstance(prompt, str)
            else tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            for prompt in prompts[start : start + batch_size]
        ]
        batch = tokenizer(texts, return_tensors="pt", padding=len(texts) > 1, add_special_tokens=False)
        with torch.inference_mode():
            out = model.generate(
                batch.input_ids,
                attention_mask=batch.attention_mask,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                pad_token_id=pad_token_id,
            )
        answers += tokenizer.batch_decode(out[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
    return answers


def logits(model_folder: Path | str, input_ids: torch.Tensor) -> torch.Tensor:
    """Float32 logits by transformers: ids [B, S] -> [B, S, V]."""
    with no_progress_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, local_files_only=True)
    with torch.inference_mode():
        result: torch.Tensor = model.eval()(input_ids=input_ids).logits
    return result.float()


@contextmanager
def no_progress_bars(*, warnings: bool = True) -> Iterator[None]:
    """Disable the progress bars of transformers, which several ranks would print over each other, and its warnings."""
    library: Any = logging
    shown, level = library.is_progress_bar_enabled(), library.get_verbosity()
    library.disable_progress_bar()
    if not warnings:
        library.set_verbosity_error()
    try:
        yield
    finally:
        library.set_verbosity(level)
        if shown:
            library.enable_progress_bar()


def architecture_of(config: Mapping[str, Any]) -> str:
    """Name of the class that transformers builds for a causal language model with this config."""
    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        remote = " Its remote code (auto_map) is not run." if "auto_map" in config else ""
        raise UsageError(f"transformers {VERSION} has no code for model_type {model_type!r}.{remote}")
    names = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    name = next((table[str(model_type)] for table in names if model_type in table), None)
    if name is None:
        raise UsageError(f"transformers {VERSION} has no causal language model of model_type {model_type!r}.")
    return str(name if isinstance(name, str) else name[0])


def effective_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the defaults of transformers filled in."""
    try:
        built = CONFIG_MAPPING[config["model_type"]].from_dict(
            {name: _with_infinity(value) for name, value in config.items() if name != "auto_map"}
        )
    except Exception as error:  # config classes raise their own exceptions
        raise UsageError(f"transformers rejects this config.json: {_short_reason(error)}.") from None
    return {name: _with_infinity(value) for name, value in built.to_dict().items()}


def _with_infinity(value: Any) -> Any:
    """Undo how ``to_dict`` writes infinite numbers, which the config classes do not read."""
    if isinstance(value, Mapping):
        inner = {name: _with_infinity(item) for name, item in value.items()}
        return float(inner["__float__"]) if inner.keys() == {"__float__"} else inner
    return [_with_infinity(item) for item in value] if isinstance(value, list) else value


def default_config(model_type: str) -> dict[str, Any]:
    """The defaults of transformers; empty if it has no such model."""
    return effective_config({"model_type": model_type}) if model_type in CONFIG_MAPPING else {}


def save_random_model(folder: Path, config: Mapping[str, Any], seed: int, *, scale: float = 1.5) -> None:
    """Save a model with random weights, also in norms and biases: ones and zeros would hide a swap.

    ``scale`` is that of matrices over the root of their fan-in. With smaller ones, rounding errors grow less.
    """
    try:
        config = {name: _with_infinity(value) for name, value in config.items()}
        settings = CONFIG_MAPPING[config["model_type"]].from_dict(config)
        with torch.random.fork_rng(devices=[]), no_progress_bars():
            torch.manual_seed(seed)
            model: Any = _class_of(settings).from_config(settings, dtype=torch.float32)
            for tensor in [*model.parameters(), *_saved_buffers(model)]:
                _draw(tensor, scale)
            model.save_pretrained(folder)
        # Some models change their config while they are built; save the requested one.
        CONFIG_MAPPING[config["model_type"]].from_dict(config).save_pretrained(folder)
    except Exception as error:  # model code raises any exception for sizes that it does not support
        raise UsageError(f"transformers cannot build a small model with this config: {_short_reason(error)}.") from None


def _class_of(config: PreTrainedConfig) -> Any:
    """The class that builds the whole model, with the towers of a multimodal one."""
    multimodal = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return AutoModelForImageTextToText if multimodal else AutoModelForCausalLM


def saved_model_logits(
    folder: Path, samples: list[Tensor], changes: Mapping[str, Any] | None = None, *, section: str | None = None
) -> list[Tensor]:
    """Float32 logits [S, V] for each sample, int64 [S].

    ``changes`` override settings of the saved config, or of a section of it.
    """
    try:
        with no_progress_bars(), torch.inference_mode():
            overrides = {} if changes is None or section else changes
            config = AutoConfig.from_pretrained(folder, local_files_only=True, **overrides)
            for name, value in changes.items() if changes and section else ():
                setattr(getattr(config, str(section)), name, value)
            model: Any = _class_of(config).from_pretrained(
                folder, config=config, dtype=torch.float32, local_files_only=True
            )
            return [model.eval()(input_ids=sample[None], use_cache=False).logits[0].clone() for sample in samples]
    except Exception as error:  # as above: any exception
        raise UsageError(f"transformers cannot run a small model with this config: {_short_reason(error)}.") from None


def embedding_modules(folder: Path) -> tuple[str, str]:
    """Paths of the token embedding and of the output layer in a saved model; empty if it has no such module."""
    try:
        with no_progress_bars():
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            model: Any = _class_of(config).from_config(config)
        paths = {id(module): path for path, module in model.named_modules()}
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        return paths.get(id(ends[0]), ""), paths.get(id(ends[1]), "")
    except Exception as error:  # as above: any exception
        raise UsageError(f"transformers does not name the embedding of this model: {_short_reason(error)}.") from None


def zero_tensors(source: Path, is_zeroed: Callable[[str], bool], folder: Path) -> Path:
    """Copy the model at ``source`` to ``folder``, with zeros in the tensors for which ``is_zeroed`` is true."""
    folder.mkdir()
    shutil.copyfile(source / "config.json", folder / "config.json")
    tensors = load_file(source / SINGLE_FILE)
    zeroed = {name: torch.zeros_like(tensor) if is_zeroed(name) else tensor for name, tensor in tensors.items()}
    save_file(zeroed, folder / SINGLE_FILE, {"format": "pt"})
    return folder


def _saved_buffers(model: Any) -> list[Tensor]:
    saved = model.state_dict()
    return [buffer for name, buffer in model.named_buffers() if name in saved and buffer.is_floating_point()]


@torch.no_grad()
def _draw(tensor: Tensor, scale: float) -> None:
    """Random values with which all intermediate results have magnitude one, so that every term matters."""
    if tensor.dim() < 2:
        tensor.normal_(0.6, 0.3)
    else:
        tensor.normal_(0.0, scale / math.sqrt(tensor.shape[-1]))


def _short_reason(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 200 else f"{text[:197]}..."
