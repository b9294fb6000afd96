"""Nemotron-H and Nemotron 3: each layer is one block, Mamba-2, attention without positions, an MLP, or experts."""

from collections.abc import Mapping
from typing import Any

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.blocks.feed_forward import Experts
from isthmus.families.family import Derived, Family, Fixed, Key, with_defaults
from isthmus.families.rules import decoder, expert_tensors, mtp, state_space
from isthmus.families.rules.decoder import flag, layer_norm, number
from isthmus.families.rules.rule import in_layers, renamed

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_MIXERS: dict[str, tuple[str, ...]] = {
    "linear_attention": ("mamba2",),
    "full_attention": ("attention",),
    "mlp": (),
    "moe": (),
    "mamba": ("mamba2",),
    "attention": ("attention",),
}


def _from_letters(hf: Mapping[str, Any]) -> list[str]:
    """The older ``hybrid_override_pattern``, such as ``M-M*``."""
    pattern = hf.get("hybrid_override_pattern", "ME*-")
    if not isinstance(pattern, str) or not set(pattern) <= _LETTERS.keys():
        raise DataError(
            f"config.json: hybrid_override_pattern must have the letters M, *, - and E, got {pattern!r:.60}."
        )
    return [_LETTERS[letter] for letter in pattern]


_TYPES = Key("layers_block_type", kind=list, default=None, null=_from_letters, aliases=("layer_types",))


def _types(hf: Mapping[str, Any]) -> list[str]:
    found: list[str] = _TYPES.read(hf)
    if (number := hf.get("num_hidden_layers", len(found))) != len(found):
        raise DataError(f"config.json: num_hidden_layers={number!r:.20} is not the number of its layers, {len(found)}.")
    if unknown := sorted({str(each) for each in found} - _MIXERS.keys()):
        raise UsageError(f"layers_block_type: {', '.join(unknown)} is not supported; {', '.join(_MIXERS)} are.")
    return found


def _write_types(_value: Any, arch: Architecture) -> dict[str, Any]:
    found = []
    for layer in range(arch.num_layers):
        mixers, has_mlp = arch.pattern.mixers_of(layer), layer not in arch.pattern.layers_without_mlp
        if mixers not in _MIXERS.values() or bool(mixers) == has_mlp:
            raise UsageError(f"{arch.family}: layer {layer} must be one block: Mamba-2, attention, an MLP or experts.")
        block = next(name for name, kind in _MIXERS.items() if kind == mixers)
        found.append(block if mixers else "moe" if arch.layers[layer].experts else "mlp")
    return {"layers_block_type": found, "num_hidden_layers": len(found)}


def _with(hf: Mapping[str, Any], *types: str) -> tuple[int, ...]:
    return tuple(layer for layer, kind in enumerate(_types(hf)) if kind in types)


_MOE = {
    "num_experts": Key("n_routed_experts", default=8, aliases=("num_local_experts",)),
    "top_k": Key("num_experts_per_tok", default=2),
    "ffn_hidden_size": Key("moe_intermediate_size", default=7688),
    "shared_ffn_hidden_size": Key("moe_shared_expert_intermediate_size", default=7688),
    "latent_size": Key("moe_latent_size", default=None, optional=True),
    "normalize": flag("norm_topk_prob", default=True),
    "scaling_factor": number("routed_scaling_factor", 1.0),
    "num_groups": Key("n_group", default=1),
    "group_top_k": Key("topk_group", default=1),
}


def _read_moe(hf: Mapping[str, Any]) -> Experts | None:
    if not _with(hf, "moe"):
        return None
    values = {name: key.read(hf) for name, key in _MOE.items()}
    return Experts(**values, dense_layers=_with(hf, "mlp"), score="sigmoid", expert_bias=True)


def _write_moe(moe: Experts | None, arch: Architecture) -> dict[str, Any]:
    if moe is None:
        return {}
    return {key.hf: key.write(getattr(moe, name), arch) for name, key in _MOE.items()}


def _write_limit(limit: tuple[float, float], arch: Architecture) -> dict[str, Any]:
    if limit[1] != float("inf"):
        raise UsageError(f"{arch.family}: config.json cannot express an upper limit of the time steps, {limit[1]}.")
    return {"time_step_min": limit[0]}


def _older(name: str) -> Fixed:
    return Fixed((None,), f"it replaces {name}; rename it")


_NAMES = {
    "model.embed_tokens": "backbone.embeddings",
    "model.layers": "backbone.layers",
    "model.norm": "backbone.norm_f",
    ".self_attn.": ".mixer.",
    ".mamba.": ".mixer.",
    ".mlp.": ".mixer.",
}
_MTP_TYPES = (["full_attention", "moe"], ["attention", "moe"])
_EXPERTS = (
    *expert_tensors.ROUTER,
    *expert_tensors.EXPERT_BIAS,
    *expert_tensors.LATENT_EXPERTS,
    *expert_tensors.SHARED_EXPERTS,
)
_MTP_ATTENTION = (*mtp.ENTRY, *mtp.inner_rules((*layer_norm("input_layernorm", "norm"), *decoder.ATTENTION)))
_MTP_EXPERTS = (*mtp.inner_rules((*layer_norm("pre_mlp_layernorm", "norm"), *_EXPERTS)), *mtp.FINAL_NORM)

FAMILY = Family(
    name="nemotron_h",
    hf_architecture="NemotronHForCausalLM",
    keys=with_defaults(decoder.KEYS, intermediate_size=21504, num_key_value_heads=8, max_position_embeddings=4096)
    | {
        "num_layers": Key(
            *("layers_block_type", list, None, _from_letters),
            aliases=_TYPES.aliases,
            decode=lambda types, _: len(types),
            encode=lambda number, arch: _write_types(number, arch)["layers_block_type"],
        ),
        "hidden_size": Key("hidden_size", default=4096),
        "num_attention_heads": Key("num_attention_heads", default=32),
        "kv_channels": Key("head_dim", default=128),
        "norm_epsilon": number("layer_norm_epsilon", 1e-5),
        "activation": Key("mlp_hidden_act", default="relu2", choices={"relu2": "relu2"}),
        "mtp_layers": Key("num_nextn_predict_layers", default=0, null=lambda hf: 0, choices={0: 0, 1: 1}),
        "mamba2.num_heads": Key("mamba_num_heads", default=128),
        "mamba2.head_dim": Key("mamba_head_dim", default=64),
        "mamba2.num_groups": Key("n_groups", default=8),
        "mamba2.state_size": Key("ssm_state_size", default=128),
        "mamba2.kernel": Key("conv_kernel", default=4),
        "mamba2.conv_bias": flag("use_conv_bias", default=True),
        "mamba2.in_bias": flag("use_bias"),
        "mamba2.out_bias": flag("use_bias"),
    },
    fixed=decoder.PLAIN_FIXED
    | {
        "mamba_hidden_act": Fixed(("silu", "swish"), "Mamba-2 is computed with SiLU"),
        "attention_bias": Fixed((False,), "transformers ignores it, and older code does not"),
        "mlp_bias": Fixed((False,), "biases of experts and their latent projections are not supported"),
        "mtp_layers_block_type": Fixed((None, *_MTP_TYPES), "MTP layers have attention and experts"),
        "mtp_hybrid_override_pattern": Fixed((None, "*E"), "MTP layers have attention and experts"),
        "mamba_n_groups": _older("n_groups"),
        "mamba_d_conv": _older("conv_kernel"),
        "mamba_dt_min": _older("time_step_min"),
        "mamba_conv_bias": _older("use_conv_bias"),
    },
    traits={"position": "none", "gated": False},
    derived={
        "mixers": Derived(lambda hf: tuple(_MIXERS[kind] for kind in _types(hf)), _write_types),
        "layers_without_mlp": Derived(
            lambda hf: tuple(layer for layer, kind in enumerate(_types(hf)) if _MIXERS[kind]), _write_types
        ),
        "moe": Derived(_read_moe, _write_moe),
        "mamba2.time_step_limit": Derived(
            lambda hf: (number("time_step_min", 0.001).read(hf), float("inf")), _write_limit
        ),
    },
    module_names={"backbone.": "model."},
    unadapted=("mixer.out_proj",),
    rules=renamed(
        (
            *decoder.EMBEDDING,
            *in_layers("attention|mamba2", *layer_norm("input_layernorm", "norm")),
            *in_layers("dense|moe", *layer_norm("pre_mlp_layernorm", "norm")),
            *in_layers("attention", *decoder.ATTENTION),
            *state_space.MAMBA2,
            *expert_tensors.DENSE,
            *_EXPERTS,
            # Each block of an MTP layer is a layer of its own in the files.
            *renamed(_MTP_ATTENTION, {mtp.HF_MTP: "mtp.layers.0."}),
            *renamed(_MTP_EXPERTS, {mtp.HF_MTP: "mtp.layers.1.", "shared_head.norm": "final_layernorm"}),
            *decoder.HEAD,
        ),
        _NAMES,
    ),
)
