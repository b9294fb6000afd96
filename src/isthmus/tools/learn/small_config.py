"""Shrinks the config of any decoder: sizes are replaced by small ones, other settings are kept."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isthmus.errors import UsageError
from isthmus.families.rules.common_settings import METADATA

_LAYERS = "num_hidden_layers n_layer n_layers num_layers decoder_layers"
_GROUPS = "num_key_value_heads num_kv_heads n_head_kv multi_query_groups"
_WIDTH = "head_dim attention_head_dim kv_channels"
_SIZES: tuple[tuple[int, int, str], ...] = (
    (64, 144, "hidden_size n_embd d_model dim model_dim embed_dim hidden_dim embedding_size"),
    (4, 6, "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads"),
    (4, 6, "attention_heads linear_num_value_heads linear_num_heads index_n_heads"),
    (4, 5, _LAYERS),
    (16, 24, "linear_key_head_dim linear_value_head_dim qk_nope_head_dim kv_lora_rank index_head_dim"),
    (16, 16, "mamba_d_state ssm_state_size state_size mamba_chunk_size chunk_size"),
    (16, 24, "mamba_d_head mamba_head_dim linear_head_dim"),
    (8, 12, "mamba_n_heads mamba_num_heads"),
    (128, 288, "mamba_d_ssm"),
    (88, 136, "intermediate_size n_inner ffn_hidden_size ffn_dim d_ff decoder_ffn_dim encoder_ffn_dim"),
    (88, 136, "dense_intermediate_size intermediate_size_mlp mlp_hidden_size"),
    (96, 112, "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length max_target_positions"),
    (6, 9, "n_routed_experts num_experts num_local_experts moe_num_experts"),
    (20, 28, "moe_intermediate_size expert_intermediate_size expert_ffn_hidden_size moe_ffn_hidden_size"),
    (28, 36, "shared_expert_intermediate_size shared_intermediate_size q_lora_rank"),
    (8, 12, "qk_rope_head_dim index_topk"),
    (8, 8, "rotary_dim"),
    (16, 16, "original_max_position_embeddings"),
    (12, 20, "v_head_dim"),
    (7, 5, "sliding_window sliding_window_size"),
    (101, 83, "vocab_size vocab_size_per_layer_input"),
)
_COUNTS: tuple[tuple[int, int, str], ...] = (
    (2, 3, "linear_num_key_heads num_global_key_value_heads mamba_n_groups n_groups mamba_ngroups"),
    (2, 3, "num_experts_per_tok num_experts_per_token experts_per_token moe_k moe_topk top_k_experts n_group"),
    (2, 3, "num_expert_group"),
    (2, 2, "encoder_layers num_encoder_layers n_shared_experts num_shared_experts moe_num_shared_experts"),
    (1, 2, "topk_group first_k_dense_replace num_dense_layers"),
    (0, 0, "num_nextn_predict_layers num_mtp_layers num_kv_shared_layers"),
)
"""They stay smaller if the config has fewer: one expert per token differs from two."""
_AT_MOST = frozenset(name for *_, names in _COUNTS for name in names.split())
_WANTED = {name: sizes for *sizes, names in (*_SIZES, *_COUNTS) for name in names.split()}
SIZE_NAMES = frozenset((*_WANTED, *_GROUPS.split(), *_WIDTH.split()))
_OF_IMAGES = {"hidden_size": 32, "embed_dim": 32, "num_hidden_layers": 2, "intermediate_size": 48, "image_size": 28}
_OF_IMAGES |= {"num_attention_heads": 2, "num_heads": 2, "depth": 2, "patch_size": 14}
_OF_TEXT = ("out_hidden_size", "text_hidden_size")
"""Settings of a vision tower that are the hidden size of the language model."""
_FIRST_LAYERS, _MOST_LAYERS = 12, 16


@dataclass(frozen=True, slots=True)
class SmallSizes:
    """One of two sets of sizes, with the number of query groups and the width of a head, which not all models have."""

    second: bool
    groups: int
    width: int


FIRST = tuple(SmallSizes(False, groups, width) for groups, width in ((2, 24), (2, 16), (4, 16), (1, 16)))
"""The first sizes that the model supports are used."""
SECOND = tuple(SmallSizes(True, groups, width) for groups, width in ((3, 32), (3, 24), (6, 24), (1, 24)))


def small_config(config: Mapping[str, Any], sizes: SmallSizes, *, all_layers: bool = False) -> dict[str, Any]:
    """The complete config of a model of a few layers, or of all."""
    return _shrunk(config, sizes, all_layers, image=False)


def number_of_layers(config: Mapping[str, Any]) -> int:
    """0 if it is unknown."""
    return next((config[name] for name in _LAYERS.split() if isinstance(config.get(name), int)), 0)


def check_layers(config: Mapping[str, Any]) -> None:
    """Raise UsageError if a small model cannot have a layer of every kind that the lists of a config have."""
    lists = _kinds_of_layers(config)
    if len(_chosen_layers(lists)) > _MOST_LAYERS:
        raise UsageError(
            f"config.json: {', '.join(lists)} have more than {_MOST_LAYERS} different layers, and mappings are "
            f"verified with models of at most {_MOST_LAYERS}."
        )


def size_keys(config: Mapping[str, Any]) -> set[str]:
    """The settings of a config that :func:`small_config` replaces."""
    return {name for name in config.keys() & SIZE_NAMES if isinstance(config[name], int)}


def _shrunk(config: Mapping[str, Any], sizes: SmallSizes, all_layers: bool, *, image: bool) -> dict[str, Any]:
    small = dict(config)
    chosen = _chosen_layers(_kinds_of_layers(config))[: 2 if image else None]
    if all_layers and not image:
        chosen = [*range(number_of_layers(config))]
    elif sizes.second and not image:
        chosen.append(chosen[-1] + 1)
    lists, layers = _layer_lists(config), len(chosen)
    targets = {name: pair[sizes.second] for name, pair in _WANTED.items()}
    targets |= dict.fromkeys(_GROUPS.split(), sizes.groups) | dict.fromkeys(_WIDTH.split(), sizes.width)
    if config.get("qk_rope_head_dim"):  # latent attention has no query groups
        rotary = targets["qk_rope_head_dim"]
        queries = targets["qk_head_dim"] = targets["qk_nope_head_dim"] + rotary
        rotated_only = config.get("head_dim") == config["qk_rope_head_dim"]
        targets |= dict.fromkeys(_WIDTH.split(), rotary if rotated_only else queries)
        targets |= dict.fromkeys(_GROUPS.split(), targets["num_attention_heads"])
    targets |= dict.fromkeys(_OF_TEXT, targets["hidden_size"])
    targets |= dict.fromkeys(_LAYERS.split(), layers) | (_OF_IMAGES if image else {})
    for name, value in config.items():
        if name == "per_layer_config" and isinstance(value, Mapping):
            numbered = {int(layer): inner for layer, inner in value.items()}
            small[name] = {
                str(number): {
                    key: 2 * targets[key] if key in targets else inner_value for key, inner_value in inner.items()
                }
                for number, layer in enumerate(chosen)
                if (inner := numbered.get(layer)) is not None
            }
        elif isinstance(value, Mapping) and name.endswith("_config"):
            small[name] = _shrunk(value, sizes, all_layers, image=not re.match("text|llm|decoder", name))
        elif name == "rope_parameters" and isinstance(value, Mapping):
            small[name] = _short_context(value, next((targets[key] for key in _WIDTH.split() if config.get(key)), 16))
        elif name in lists:
            is_numbers = value == [*range(len(value))]
            small[name] = [number if is_numbers else value[layer % len(value)] for number, layer in enumerate(chosen)]
        elif name in targets and isinstance(value, int) and not isinstance(value, bool):
            small[name] = min(targets[name], value) if name in _AT_MOST else targets[name]
        elif name.endswith("_token_id"):
            small[name] = 0 if name.startswith("pad") and value is not None else None if value is None else 1
    return small


def _short_context(rope: Mapping[str, Any], width: int) -> dict[str, Any]:
    """Rotary settings with an original context that samples exceed, and with as many factors as rotary pairs."""
    short: dict[str, Any] = {}
    pairs = int(width * (rope.get("partial_rotary_factor") or 1.0)) // 2
    for name, value in rope.items():
        if isinstance(value, Mapping):
            value = _short_context(value, width)
        elif name == "mrope_section":
            value = [pairs - (len(value) - 1) * (pairs // len(value)), *[pairs // len(value)] * (len(value) - 1)]
        elif isinstance(value, list):
            value = value[:pairs]
        elif name == "original_max_position_embeddings" and value is not None:
            value = 16
        short[name] = value
    return short


def _layer_lists(config: Mapping[str, Any]) -> list[str]:
    """Settings with an entry for each layer."""
    num_layers = number_of_layers(config)
    return [name for name, value in config.items() if isinstance(value, list) and len(value) == num_layers > 1]


def _kinds_of_layers(config: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Settings with a kind for each layer, by name; others list the numbers of all layers."""
    lists = {name: config[name] for name in _layer_lists(config) if not METADATA.fullmatch(name)}
    return {name: value for name, value in lists.items() if value != [*range(len(value))]}


def _chosen_layers(lists: Mapping[str, list[Any]]) -> list[int]:
    """The fewest first layers, and at least 4, with every kind of layer.

    If these are many, the first layer of each kind, after as many of the first layers as there is place for.
    """
    kinds = [tuple(map(str, kinds_of_layer)) for kinds_of_layer in zip(*lists.values(), strict=True)]
    all_kinds = set(kinds)
    if not kinds:
        return [*range(4)]
    for count in range(4, _FIRST_LAYERS + 1):
        if set(kinds[:count]) == all_kinds:
            return [*range(count)]
    chosen = {kinds.index(kind) for kind in all_kinds}
    more = (number for number in range(len(kinds)) if number not in chosen)
    return sorted([*chosen, *itertools.islice(more, max(4 - len(chosen), 0))])
