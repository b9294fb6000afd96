"""A small model with random weights, built by transformers from a config."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import __version__ as transformers_version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from isthmus.errors import UsageError
from isthmus.hf.model_folder import SINGLE_FILE
from isthmus.hf.tiny_model import no_progress_bars

VERSION: str = transformers_version


def architecture_of(config: Mapping[str, Any]) -> str:
    """Name of the class that transformers builds for a causal language model with this config."""
    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        remote = " Its remote code (auto_map) is not run." if "auto_map" in config else ""
        raise UsageError(f"transformers {VERSION} has no code for model_type {model_type!r}.{remote}")
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(model_type))
    if name is None:
        raise UsageError(f"transformers {VERSION} has no causal language model of model_type {model_type!r}.")
    return str(name if isinstance(name, str) else name[0])


def effective_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the defaults of transformers filled in."""
    try:
        built = CONFIG_MAPPING[config["model_type"]].from_dict({k: v for k, v in config.items() if k != "auto_map"})
    except Exception as error:  # config classes raise their own exceptions
        raise UsageError(f"transformers rejects this config.json: {_short_reason(error)}.") from None
    return dict(built.to_dict())


def save_random_model(folder: Path, config: Mapping[str, Any], seed: int) -> None:
    """Save a model with random weights, also in norms and biases: ones and zeros would hide a swap."""
    try:
        settings = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
        with torch.random.fork_rng(devices=[]), no_progress_bars():
            torch.manual_seed(seed)
            model: Any = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
            for tensor in [*model.parameters(), *_saved_buffers(model)]:
                _draw(tensor)
            model.save_pretrained(folder)
        # Some models change their config while they are built; save the requested one.
        CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)).save_pretrained(folder)
    except Exception as error:  # model code raises any exception for sizes that it does not support
        raise UsageError(f"transformers cannot build a small model with this config: {_short_reason(error)}.") from None


def saved_model_logits(folder: Path, samples: list[Tensor], **changes: Any) -> list[Tensor]:
    """Float32 logits [S, V] for each sample, int64 [S]; ``changes`` override settings of the saved config."""
    try:
        with no_progress_bars(), torch.inference_mode():
            config = AutoConfig.from_pretrained(folder, local_files_only=True, **changes)
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=torch.float32, local_files_only=True
            )
            return [model.eval()(input_ids=sample[None], use_cache=False).logits[0].clone() for sample in samples]
    except Exception as error:  # as above: any exception
        raise UsageError(f"transformers cannot run a small model with this config: {_short_reason(error)}.") from None


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
def _draw(tensor: Tensor) -> None:
    """Random values with which all intermediate results have magnitude one, so that every term matters."""
    if tensor.dim() < 2:
        tensor.normal_(0.6, 0.3)
    else:
        tensor.normal_(0.0, 1.5 / math.sqrt(tensor.shape[-1]))


def _short_reason(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 200 else f"{text[:197]}..."
