"""Tiny models with random weights in every tensor, and samples with varying lengths and loss masks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from isthmus.convert.hf.other_forms import other_names
from isthmus.data.store.indexed_dataset import IndexedWriter, open_indexed, write_manifest
from isthmus.data.store.sample_store import SampleStore
from isthmus.families.models.isthmus import FAMILY as ISTHMUS
from isthmus.families.registry import family_for
from isthmus.hf.model_folder import ModelFolder
from isthmus.hf.shim.configuration_isthmus import IsthmusConfig
from isthmus.hf.shim.modeling_isthmus import IsthmusForCausalLM
from ranks.tiny_families import TINY_FAMILIES
from ranks.tiny_families.tiny_family import LATENT

# Registered like a class of transformers; tests of exported model code unregister it.
AutoConfig.register("isthmus", IsthmusConfig)
AutoModelForCausalLM.register(IsthmusConfig, IsthmusForCausalLM)

VOCAB = 77
"""Not divisible by any number of ranks: the embedding is padded."""
SEQ_LENGTH = 24
GLOBAL_BATCH_SIZE = 4
VALID_SAMPLES = 10
"""The first samples of a store; their last batch is smaller than the others."""
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}

ARCHETYPES = ("qwen3", "gpt2", "gpt_oss", "deepseek_v3")
"""Dense; LayerNorm with biases and position embeddings; MoE with biases and sinks; MLA."""
OWN_SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 20,
        "num_key_value_heads": 4,
    },
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "head_dim": 8, "eos_token_id": 2},
    "deepseek_v2": LATENT,
    "glm4_moe": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
    },
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 5},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 12},
    "gpt_neox": {"head_dim": 8},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    # GPT-2 with experts: transformers has no such model.
    "isthmus": {
        "position_embedding_type": "learned",
        "normalization": "LayerNorm",
        "hidden_act": "gelu",
        "gated_mlp": False,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "mlp_only_layers": [2],
        "auto_map": dict(ISTHMUS.auto_map),
        **dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias", "expert_mlp_bias", "moe_output_bias"), True),
    },
    "deepseek_v3": LATENT | {"n_group": 2, "topk_group": 1, "num_mtp_layers": 0},
    **{name: tiny.sizes for name, tiny in TINY_FAMILIES.items()},
}
"""Additional sizes of some families."""


def without_checksums(folder: Path) -> Path:
    """The folder as another program writes it."""
    for path in folder.rglob("checksums.json"):
        path.unlink()
    return folder


def model_class(family: str) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    """The class that loads a family's models; of multimodal models the whole one."""
    tiny = TINY_FAMILIES.get(family)
    return AutoModelForCausalLM if tiny is None or tiny.around is None else AutoModelForImageTextToText


def load_network(folder: Path | str, **options: Any) -> Any:
    """The model of a folder, by transformers."""
    family = json.loads(Path(folder, "config.json").read_text())["model_type"]
    return model_class(family).from_pretrained(folder, **options)


def tiny_config(family: str, sizes: Mapping[str, Any] | None = None, **settings: Any) -> PretrainedConfig:
    """The config of a tiny model; ``sizes`` replaces :data:`SIZES`."""
    values = {**(SIZES if sizes is None else sizes), **OWN_SIZES.get(family, {}), **settings}
    tiny = TINY_FAMILIES.get(family)
    if tiny is None or tiny.around is None:
        computed = {name for name in values if isinstance(getattr(CONFIG_MAPPING[family], name, None), property)}
        return AutoConfig.for_model(family, **{name: value for name, value in values.items() if name not in computed})
    outer = {"tie_word_embeddings": values["tie_word_embeddings"]} if "tie_word_embeddings" in values else {}
    return AutoConfig.for_model(family, text_config=values, **tiny.around, **outer)


def build_model_folder(
    folder: Path,
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    shards: str = "5GB",
    names: bool = True,
    **settings: Any,
) -> Path:
    """Save a transformers model with random weights, including norms and biases: equal values would hide errors.

    ``names``: tensors have the names of published files, where transformers writes others.
    """
    torch.manual_seed(0)
    model = model_class(family).from_config(tiny_config(family, **settings)).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name or ".ln_" in name or name.endswith("scale") else 0.0, std=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "router_bias")):
                buffer.normal_(std=0.1)
            elif name.endswith("layer_scalar"):
                buffer.normal_(mean=1.0, std=0.1)
    model.save_pretrained(folder, max_shard_size=shards)
    if names:
        restore_names(folder)
    return folder


RESAVED = {
    "olmo_hybrid": ("layer_types", "full_attention", "feedforward_layer_norm", "post_attention_layernorm"),
    "kimi_linear": ("mlp_layer_types", "dense", ".block_sparse_moe.", ".mlp."),
}
"""Setting with kinds of layers, a kind, and in its layers: a name that transformers writes, and the published one."""


def restore_names(folder: Path) -> None:
    """Names and shapes of published files, where transformers writes others."""
    config = json.loads((folder / "config.json").read_text())
    family = family_for(config)
    resaved = RESAVED.get(config["model_type"])
    for file in folder.glob("*.safetensors") if family.nested is not None or family.other_names else ():
        tensors = load_file(file)
        names = {name: name for name in tensors} if family.nested is None else family.nested.renamed(tensors)
        if resaved is not None:
            setting, kind, old, new = resaved
            layers = tuple(f"model.layers.{layer}." for layer, item in enumerate(config[setting]) if item == kind)
            names = {name: name.replace(old, new) if name.startswith(layers) else name for name in tensors}
        elif family.other_names:
            names |= other_names(ModelFolder.open(folder), family, config)
        shapes = {} if family.nested is None else family.hf_shapes(family.to_architecture(config))
        published = {
            names[name]: tensor if tensor.shape == shapes.get(names[name], tensor.shape) else tensor.mT.contiguous()
            for name, tensor in tensors.items()
        }
        if any(published.get(name) is not tensor for name, tensor in tensors.items()):
            save_file(published, file, {"format": "pt"})


def build_adapter(base: Path, folder: Path, **settings: Any) -> Path:
    """Save an adapter with random weights in every tensor, as PEFT does."""
    import peft

    model = load_network(base)
    torch.manual_seed(1)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(task_type="CAUSAL_LM", **{"r": 3, "lora_alpha": 7, **settings})
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * (0.02 if "magnitude" in name else 0.2))
    adapted.save_pretrained(folder)
    return folder


def add_mtp_layers(folder: Path) -> Path:
    """Add MTP layers to a saved model: transformers does not write them. Returns the folder."""
    config = json.loads((folder / "config.json").read_text())
    family = family_for(config)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors.get("model.embed_tokens.weight")
    shared = {"embed_tokens": embedding, "shared_head.head": tensors.get("lm_head.weight", embedding)}
    generator = torch.Generator().manual_seed(1)
    for name, shape in family.hf_shapes(family.to_architecture(config)).items():
        if name in tensors:
            continue
        copy = next((tensor for part, tensor in shared.items() if name.endswith(f"{part}.weight")), None)
        random = torch.randn(shape, generator=generator) * 0.1 + (1.0 if "norm" in name else 0.0)
        tensors[name] = random if copy is None else copy.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def build_samples(prefix: Path, *, count: int = 36, seed: int = 0) -> Path:
    """Save ``count`` samples of 3 to 24 tokens; loss tokens are 90% or 20% of a sample, in alternation."""
    random = np.random.default_rng(seed)
    samples = []
    for number in range(count):
        length = int(random.integers(3, SEQ_LENGTH + 1))
        mask = (random.random(length) < (0.9 if number % 2 else 0.2)).astype(np.uint8)
        mask[-1] = 1
        samples.append((random.integers(0, VOCAB, length).astype(np.int32), mask))
    return _write_samples(prefix, samples, per_document=1)


def build_pairs(prefix: Path, *, count: int = 24, seed: int = 0, margins: bool = False) -> Path:
    """Save ``count`` pairs of answers: a prompt of 1 to 8 tokens, and two answers of 2 to 15 tokens.

    With ``margins`` the pairs have margins from 0 to 1.
    """
    random = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        prompt = random.integers(0, VOCAB, int(random.integers(1, 9)))
        for _ in range(2):
            answer = random.integers(0, VOCAB, int(random.integers(2, 17)))
            mask = np.repeat(np.array([0, 1], dtype=np.uint8), [len(prompt), len(answer)])
            samples.append((np.concatenate([prompt, answer]).astype(np.int32), mask))
    values = np.repeat(random.random(count), 2) if margins else None
    return _write_samples(prefix, samples, per_document=2, values=values)


def build_answers(prefix: Path, *, count: int = 32, seed: int = 0) -> Path:
    """Save ``count`` answers of 2 to 16 tokens to prompts of 1 to 8 tokens; about half of them are desirable."""
    random = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        lengths = (int(random.integers(1, 9)), int(random.integers(2, 17)))
        mask = np.repeat(np.array([0, 1], dtype=np.uint8), lengths)
        samples.append((random.integers(0, VOCAB, sum(lengths)).astype(np.int32), mask))
    return _write_samples(prefix, samples, per_document=1, values=random.integers(0, 2, count))


def _write_samples(prefix: Path, samples: list[tuple[Any, Any]], *, per_document: int, values: Any = None) -> Path:
    with IndexedWriter(prefix, np.int32, masked=True, valued=values is not None) as writer:
        for number, (tokens, mask) in enumerate(samples):
            writer.extend(tokens, (len(tokens),), mask, None if values is None else values[number : number + 1])
        writer.end_documents([per_document] * (len(samples) // per_document))
    write_manifest(prefix, {"pair": writer.close()})
    return prefix


def open_samples(prefix: Path | str) -> SampleStore:
    """The samples that :func:`build_samples` or :func:`build_pairs` wrote."""
    return SampleStore.from_indexed(open_indexed(prefix))
