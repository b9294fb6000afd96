"""Kimi Linear: Kimi delta attention, every fourth layer latent attention without positions; sigmoid routing."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from isthmus.errors import DataError
from isthmus.families.family import Derived, Family, Fixed, Key, with_defaults
from isthmus.families.models.mixtral import NAMES
from isthmus.families.rules import decoder, delta_net, expert_tensors, mla
from isthmus.families.rules.decoder import HF_LAYER, flag, number
from isthmus.families.rules.delta_net import FULL, LINEAR
from isthmus.families.rules.rule import in_layers, renamed

_KIND: str = "kimi_delta_attention"
_HF, _SECTION = HF_LAYER + "self_attn.", "linear_attn_config"
_BLOCK = {".mlp.": NAMES[".mlp."]}
_PROJECTION = delta_net.in_proj(
    ("q_proj", "Lk"), ("k_proj", "Lk"), ("v_proj", "Lv"), ("b_proj", "Ln"), kind=_KIND, hf=_HF
)


def _size(plain: str, in_section: str, default: int) -> Derived:
    """A size in ``linear_attn_config``, which wins, or beside it."""

    def read(hf: Mapping[str, Any]) -> int:
        section = hf.get(_SECTION) or {}
        found = section.get(in_section, Key(plain, default=default).read(hf)) if isinstance(section, Mapping) else None
        if not isinstance(found, int) or found < 1:
            raise DataError(f"config.json: {_SECTION}.{in_section} must be a positive integer, got {found!r:.60}.")
        return found

    return Derived(read, lambda size, arch: {plain: size, _SECTION: None})


def _layer_types(hf: Mapping[str, Any]) -> list[str]:
    """Layers that ``linear_attn_config`` lists, from 1, or every fourth after the first."""
    section, layers = hf.get(_SECTION) or {}, range(Key("num_hidden_layers").read(hf))
    full, linear = section.get("full_attn_layers"), section.get("kda_layers")
    if full is None or linear is None:
        return [FULL if layer and layer % 4 == 0 else LINEAR for layer in layers]
    if sorted([*full, *linear]) != [layer + 1 for layer in layers]:
        raise DataError(f"config.json: full_attn_layers and kda_layers must list each of {len(layers)} layers once.")
    return [FULL if layer + 1 in full else LINEAR for layer in layers]


FAMILY = Family(
    name="kimi_linear",
    hf_architecture="KimiLinearForCausalLM",
    keys=with_defaults(mla.KEYS, rms_norm_eps=1e-5)
    | {
        "mla.q_lora_rank": Key("q_lora_rank", default=None, optional=True),
        "max_position_embeddings": Key("model_max_length", default=1048576, aliases=("max_position_embeddings",)),
        "delta_net.norm_epsilon": number("rms_norm_eps", 1e-5),
        "moe.num_experts": Key("num_experts", default=256, aliases=("num_local_experts",)),
        "moe.top_k": Key("num_experts_per_token", default=8, aliases=("num_experts_per_tok",)),
        "moe.ffn_hidden_size": Key("moe_intermediate_size", default=1024),
        "moe.shared_ffn_hidden_size": replace(
            expert_tensors.shared_width("num_shared_experts", default=1), aliases=("n_shared_experts",)
        ),
        "moe.scaling_factor": number("routed_scaling_factor", 2.446),
        "moe.normalize": replace(flag("moe_renormalize", default=True), aliases=("norm_topk_prob",)),
        "moe.num_groups": Key("num_expert_group", default=1, aliases=("n_group",)),
        "moe.group_top_k": Key("topk_group", default=1),
    },
    fixed=mla.FIXED
    | {
        "moe_router_activation_func": Fixed(("sigmoid",), "the only score function of this family"),
        "mla_use_nope": Fixed((True,), "latent attention of this family has no positions"),
    },
    traits={"position": "none", "moe.score": "sigmoid", "moe.expert_bias": True},
    derived=mla.DERIVED
    | {
        "mixers": delta_net.mixers(_KIND, _layer_types),
        "moe.dense_layers": expert_tensors.mlp_layer_types(1, "first_k_dense_replace"),
        "delta_net.num_key_heads": _size("linear_num_heads", "num_heads", 32),
        "delta_net.num_value_heads": _size("linear_num_heads", "num_heads", 32),
        "delta_net.key_head_dim": _size("linear_head_dim", "head_dim", 128),
        "delta_net.value_head_dim": _size("linear_head_dim", "head_dim", 128),
        "delta_net.conv_kernel": _size("linear_conv_kernel_dim", "short_conv_kernel_size", 4),
    },
    other_names={_BLOCK[".mlp."]: ".mlp."},  # of dense layers, written by transformers
    module_names={".block_sparse_moe.": ".mlp.", "self_attn.f_": "self_attn.forget_gate.f_"},
    rules=decoder.pre_norm_rules(
        attention=(
            *in_layers("attention", *mla.ATTENTION),
            *delta_net.mixer_rules(
                _PROJECTION,
                norm="o_norm",
                out="o_proj",
                time_step="time_step",
                kind=_KIND,
                hf=_HF,
                convolutions=("q_conv1d", "k_conv1d", "v_conv1d"),
            ),
        ),
        mlp=(
            *expert_tensors.DENSE,
            *renamed((*expert_tensors.ROUTER, *expert_tensors.EXPERT_BIAS, *expert_tensors.SHARED_EXPERTS), _BLOCK),
            *renamed(expert_tensors.EXPERTS, NAMES),
        ),
    ),
)
