"""SmolLM3: Llama with layers without rotary embedding, by default every fourth."""

from collections.abc import Mapping
from typing import Any

from isthmus.errors import DataError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Derived, Family, Fixed, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag


def _unrotated(hf: Mapping[str, Any]) -> tuple[int, ...]:
    rotated, layers = hf.get("no_rope_layers"), range(hf["num_hidden_layers"])
    if rotated is None:
        interval = Key("no_rope_layer_interval", default=4).read(hf)
        rotated = [(layer + 1) % interval for layer in layers]
    if not isinstance(rotated, list) or len(rotated) < len(layers):
        raise DataError(f"config.json: no_rope_layers must list all {len(layers)} layers, got {rotated!r}.")
    return tuple(layer for layer in layers if not rotated[layer])


def _listed(unrotated: tuple[int, ...], arch: Architecture) -> dict[str, Any]:
    return {"no_rope_layers": [int(layer not in unrotated) for layer in range(arch.num_layers)]}


FAMILY = Family(
    name="smollm3",
    hf_architecture="SmolLM3ForCausalLM",
    keys=decoder.KEYS
    | decoder.ATTENTION_BIAS
    | {
        "num_query_groups": decoder.kv_heads(default=4),
        "max_position_embeddings": Key("max_position_embeddings", default=32768),
        "mlp_bias": flag("mlp_bias"),
        "tie_embeddings": flag("tie_word_embeddings", default=True),
    },
    derived={"unrotated_layers": Derived(_unrotated, _listed)},
    fixed=decoder.FIXED | {"use_sliding_window": Fixed((False,), "sliding windows are not supported for this family")},
    rope_defaults={"rope_theta": 2000000.0},
    rules=decoder.RULES,
)
