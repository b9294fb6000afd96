"""Jamba: Mamba-1 in most layers, attention without positions in some, experts in every other layer."""

from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.blocks.feed_forward import Experts
from isthmus.families.family import Derived, Family, Key, with_defaults
from isthmus.families.rules import decoder, expert_tensors, state_space
from isthmus.families.rules.decoder import flag
from isthmus.families.rules.rule import in_layers, renamed


def _chosen(hf: Mapping[str, Any], name: str, period: int, offset: int) -> set[int]:
    """Every nth layer, from the first one given."""
    step, first = (
        Key(f"{name}_period", default=period).read(hf),
        Key(f"{name}_offset", default=offset, least=0).read(hf),
    )
    if first >= step:
        raise DataError(f"config.json: {name}_offset={first} must be less than {name}_period={step}.")
    return set(range(first, Key("num_hidden_layers").read(hf), step))


def _written(layers: set[int], name: str, arch: Architecture) -> dict[str, Any]:
    for step in range(1, arch.num_layers + 2):
        for first in range(step):
            if set(range(first, arch.num_layers, step)) == layers:
                return {f"{name}_period": step, f"{name}_offset": first}
    raise UsageError(f"{arch.family}: config.json cannot express {sorted(layers)}, which are no every nth layers.")


def _read_mixers(hf: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    attention = _chosen(hf, "attn_layer", 8, 4)
    return tuple(
        ("attention",) if layer in attention else ("mamba",) for layer in range(Key("num_hidden_layers").read(hf))
    )


def _write_mixers(_mixers: Sequence[tuple[str, ...]], arch: Architecture) -> dict[str, Any]:
    kinds = state_space.single_mixers(arch, "attention", "mamba")
    return _written({layer for layer, kind in enumerate(kinds) if kind == "attention"}, "attn_layer", arch)


def _read_moe(hf: Mapping[str, Any]) -> Experts | None:
    if (experts := Key("num_experts", default=16).read(hf)) == 1:
        return None
    top_k, width = Key("num_experts_per_tok", default=2).read(hf), decoder.KEYS["ffn_hidden_size"].read(hf)
    every = range(Key("num_hidden_layers").read(hf))
    chosen = _chosen(hf, "expert_layer", 2, 1)
    dense = tuple(layer for layer in every if layer not in chosen)
    return Experts(num_experts=experts, top_k=top_k, ffn_hidden_size=width, dense_layers=dense)


def _write_moe(moe: Experts | None, arch: Architecture) -> dict[str, Any]:
    if moe is None:
        return {"num_experts": 1}
    if moe.ffn_hidden_size != arch.mlp.ffn_hidden_size:
        raise UsageError(f"{arch.family}: experts are as wide as dense feed-forward blocks.")
    layers = set(range(arch.num_layers)).difference(moe.dense_layers)
    return {"num_experts": moe.num_experts, "num_experts_per_tok": moe.top_k, **_written(layers, "expert_layer", arch)}


FAMILY = Family(
    name="jamba",
    hf_architecture="JambaForCausalLM",
    keys=with_defaults(decoder.KEYS, num_key_value_heads=8, max_position_embeddings=262144)
    | {
        "mamba.state_size": Key("mamba_d_state", default=16),
        "mamba.kernel": Key("mamba_d_conv", default=4),
        "mamba.conv_bias": flag("mamba_conv_bias", True),
        "mamba.proj_bias": flag("mamba_proj_bias"),
    },
    fixed=decoder.FIXED,
    traits={"position": "none", "mamba.norms": True},
    derived={
        "mixers": Derived(_read_mixers, _write_mixers),
        "moe": Derived(_read_moe, _write_moe),
        "mamba.inner_size": Derived(state_space.EXPANSION.read, state_space.write_expansion),
        "mamba.time_step_rank": state_space.time_step_rank("mamba_dt_rank"),
    },
    rules=renamed(
        decoder.pre_norm_rules(
            attention=(*in_layers("attention", *decoder.ATTENTION), *state_space.MAMBA, *state_space.MAMBA_NORMS),
            mlp=(
                *expert_tensors.DENSE,
                *renamed(expert_tensors.ROUTER, {"mlp.gate": "mlp.router"}),
                *expert_tensors.EXPERTS,
            ),
        ),
        state_space.FEED_FORWARD_NAMES,
    ),
)
