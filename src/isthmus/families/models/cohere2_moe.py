"""Cohere Command A+: Command A with experts, whose first layers may be dense, and LayerNorm or RMSNorm."""

from collections.abc import Mapping
from typing import Any

from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Derived, Family, Fixed, Key, without
from isthmus.families.models import cohere2
from isthmus.families.rules import decoder, expert_tensors
from isthmus.families.rules.decoder import flag, number
from isthmus.families.rules.sliding_window import read_window

_WINDOW, _EVERY = 4096, 4
_WIDTH = "intermediate_size"
_DENSE = expert_tensors.mlp_layer_types(dense=0)
_PREFIX = Key("prefix_dense_sliding_window_pattern", default=1)
_EPSILONS = {"RMSNorm": number("rms_norm_eps", None), "LayerNorm": number("layer_norm_eps", 1e-5)}


def _normalization(hf: Mapping[str, Any]) -> str:
    return "LayerNorm" if _EPSILONS["RMSNorm"].read(hf) is None else "RMSNorm"


def _write_norms(_value: Any, arch: Architecture) -> dict[str, Any]:
    return {"rms_norm_eps": None, _EPSILONS[arch.norm.normalization].hf: arch.norm.norm_epsilon}


def _unrotated(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers with full attention, except for dense ones if ``prefix_dense_sliding_window_pattern`` is 1."""
    layers = Key("num_hidden_layers").read(hf)
    window, full = read_window("pattern", hf, _WINDOW, layers, _EVERY)
    rotated = _DENSE.read(hf) if _PREFIX.read(hf) == 1 else ()
    return tuple(layer for layer in (range(layers) if window is None else full) if layer not in rotated)


def _write_unrotated(unrotated: tuple[int, ...], arch: Architecture) -> dict[str, Any]:
    full = (
        arch.windows.full_attention_layers if arch.windows.sliding_window is not None else tuple(range(arch.num_layers))
    )
    dense = () if arch.moe is None else arch.moe.dense_layers
    for pattern, rotated in ((1, dense), (_EVERY, ())):
        if unrotated == tuple(layer for layer in full if layer not in rotated):
            return {_PREFIX.hf: pattern}
    raise UsageError(
        f"{arch.family}: config.json cannot express layers without rotary embedding other than those with full "
        f"attention, got {list(unrotated)}."
    )


FAMILY = Family(
    name="cohere2_moe",
    hf_architecture="Cohere2MoeForCausalLM",
    keys=without(cohere2.FAMILY.keys, "norm_epsilon")
    | {
        "kv_channels": Key("head_dim", default=128),
        "ffn_hidden_size": Key("prefix_dense_intermediate_size", default=None, null=lambda hf: hf[_WIDTH]),
        "moe.num_experts": Key("num_experts", default=8),
        "moe.top_k": Key("num_experts_per_tok", default=2),
        "moe.ffn_hidden_size": Key(_WIDTH),
        "moe.shared_ffn_hidden_size": expert_tensors.shared_width("num_shared_experts", default=0, width=_WIDTH),
        "moe.shared_mean": Key(
            "shared_expert_combination_strategy", kind=str, default="average", choices={"average": True, "sum": False}
        ),
        "moe.score": Key(
            "expert_selection_fn",
            kind=str,
            default="softmax",
            choices={"softmax": "softmax_of_chosen", "sigmoid": "sigmoid"},
        ),
        "moe.normalize": flag("norm_topk_prob", default=True),
    },
    derived={
        "normalization": Derived(_normalization, _write_norms),
        "norm_epsilon": Derived(lambda hf: _EPSILONS[_normalization(hf)].read(hf), _write_norms),
        "moe.dense_layers": _DENSE,
        "unrotated_layers": Derived(_unrotated, _write_unrotated),
    },
    fixed=decoder.FIXED
    | {
        "first_k_dense_replace": Fixed((None, 0), "layer_types and mlp_layer_types take its place; write them"),
        "rope_scaling": Fixed((None,), "transformers ignores it in this class; write rope_parameters in its place"),
    },
    traits=without(cohere2.FAMILY.traits, "normalization"),
    sliding_window="pattern",
    sliding_window_default=_WINDOW,
    sliding_window_pattern=_EVERY,
    flat_rope=False,
    rules=(*decoder.EMBEDDING, *decoder.INPUT_NORM, *decoder.ATTENTION, *expert_tensors.DENSE_AND_MOE, *decoder.HEAD),
)
