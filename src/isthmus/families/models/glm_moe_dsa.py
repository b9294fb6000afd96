"""GLM-5: DeepSeek-V3.2's attention, whose indexers some layers share, and experts without groups."""

from collections.abc import Mapping
from typing import Any

from isthmus.errors import DataError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Derived, Family, Key, with_defaults
from isthmus.families.models import deepseek_v32
from isthmus.families.rules import key_indexer

_KINDS = {"F": "full", "S": "shared"}


def _shared(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers that use the selection of the layer before."""
    layers = range(hf["num_hidden_layers"])
    kinds = hf.get("indexer_types")
    if kinds is None and (pattern := hf.get("index_topk_pattern")) is not None:
        kinds = [_KINDS.get(kind, kind) for kind in pattern]
    if kinds is None:
        every = Key("index_topk_freq", default=1, least=0).read(hf) or 1
        first = Key("index_skip_topk_offset", default=2, least=0).read(hf)
        return tuple(layer for layer in layers if max(layer - first + 1, 0) % every)
    if not isinstance(kinds, list) or len(kinds) < len(layers) or not set(map(str, kinds)) <= set(_KINDS.values()):
        raise DataError(f"config.json: indexer_types must be full or shared for {len(layers)} layers, got {kinds!r}.")
    return tuple(layer for layer in layers if kinds[layer] == "shared")


def _listed(shared: tuple[int, ...], arch: Architecture) -> dict[str, Any]:
    return {"indexer_types": ["shared" if layer in shared else "full" for layer in range(arch.num_layers)]}


FAMILY = Family(
    name="glm_moe_dsa",
    hf_architecture="GlmMoeDsaForCausalLM",
    keys=with_defaults(deepseek_v32.KEYS, max_position_embeddings=202752, rms_norm_eps=1e-5)
    | key_indexer.keys(heads=32)
    | {
        "mla.q_lora_rank": Key("q_lora_rank", default=2048),
        "mla.qk_nope_head_dim": Key("qk_nope_head_dim", default=192),
        "mla.v_head_dim": Key("v_head_dim", default=256),
        "moe.num_groups": Key("n_group", default=1),
        "moe.group_top_k": Key("topk_group", default=1),
    },
    fixed=deepseek_v32.FIXED,
    traits={**deepseek_v32.FAMILY.traits, "indexer.rotary_interleaved": True},
    derived={**deepseek_v32.FAMILY.derived, "indexer.shared_layers": Derived(_shared, _listed)},
    sliding_window="unread",
    rules=deepseek_v32.RULES,
)
