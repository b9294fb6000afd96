"""Rules and config keys shared by families with Mamba layers; names are those of Megatron-Core's MambaMixer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.config_keys import Derived, Fixed, Key
from isthmus.families.rules.decoder import HF_LAYER, LAYER, flag, in_layer
from isthmus.families.rules.rule import HfPart, Rule, in_layers


def sections(name: str, hf: str, rows: tuple[str, ...], *tail: str, **fields: Any) -> Rule:
    """A tensor of a layer whose sections have ``rows`` each and are sharded each by itself."""
    parts = tuple(HfPart(HF_LAYER + hf, (symbol, *tail)) for symbol in rows)
    return Rule(canonical=LAYER + name, parts=parts, shard="parts", **fields)


_IN, _CONV = ("Mi", "Mi", "Mg", "Mg", "Mh"), ("Mi", "Mg", "Mg")
MAMBA2 = in_layers(
    "mamba2",
    sections("mixer.in_proj.weight", "mamba.in_proj.weight", _IN, "H"),
    sections("mixer.in_proj.bias", "mamba.in_proj.bias", _IN, init="zeros", when="mamba2.in_bias"),
    sections("mixer.conv1d.weight", "mamba.conv1d.weight", _CONV, "1", "Mk"),
    sections("mixer.conv1d.bias", "mamba.conv1d.bias", _CONV, init="zeros", when="mamba2.conv_bias"),
    in_layer("mixer.A_log", "mamba.A_log", "Mh", shard="rows", init="log_decay", dtype="float32"),
    in_layer("mixer.D", "mamba.D", "Mh", shard="rows", init="plain_ones", dtype="float32"),
    in_layer("mixer.dt_bias", "mamba.dt_bias", "Mh", shard="rows", init="time_step", dtype="float32"),
    in_layer("mixer.norm.weight", "mamba.norm.weight", "Mi", shard="rows", init="plain_ones", when="mamba2.norm"),
    in_layer("mixer.out_proj.weight", "mamba.out_proj.weight", "H", "Mi", shard="cols"),
    in_layer("mixer.out_proj.bias", "mamba.out_proj.bias", "H", init="zeros", when="mamba2.out_bias"),
)
_XZ = ("Ci", "Ci")
MAMBA = in_layers(
    "mamba",
    sections("mixer.in_proj.weight", "mamba.in_proj.weight", _XZ, "H"),
    sections("mixer.in_proj.bias", "mamba.in_proj.bias", _XZ, init="zeros", when="mamba.proj_bias"),
    in_layer("mixer.conv1d.weight", "mamba.conv1d.weight", "Ci", "1", "Ck", shard="rows"),
    in_layer("mixer.conv1d.bias", "mamba.conv1d.bias", "Ci", shard="rows", init="zeros", when="mamba.conv_bias"),
    in_layer("mixer.x_proj.weight", "mamba.x_proj.weight", "Cx", "Ci", shard="cols"),
    in_layer("mixer.dt_proj.weight", "mamba.dt_proj.weight", "Ci", "Cr", shard="rows"),
    in_layer("mixer.dt_proj.bias", "mamba.dt_proj.bias", "Ci", shard="rows", init="time_step"),
    in_layer("mixer.A_log", "mamba.A_log", "Ci", "Cs", shard="rows", init="log_decay", dtype="float32"),
    in_layer("mixer.D", "mamba.D", "Ci", shard="rows", init="plain_ones", dtype="float32"),
    in_layer("mixer.out_proj.weight", "mamba.out_proj.weight", "H", "Ci", shard="cols"),
    in_layer("mixer.out_proj.bias", "mamba.out_proj.bias", "H", init="zeros", when="mamba.proj_bias"),
)
MAMBA_NORMS = in_layers(
    "mamba",
    *(
        in_layer(f"mixer.{name}_layernorm.weight", f"mamba.{name}_layernorm.weight", width, init="plain_ones")
        for name, width in (("dt", "Cr"), ("b", "Cs"), ("c", "Cs"))
    ),
)


def head_dim(width: Key, write_width: Callable[[int, Architecture], Mapping[str, Any]]) -> Derived:
    """``mamba_d_head``, which may be ``auto``; ``width`` is that of all heads."""

    def read(hf: Mapping[str, Any]) -> int:
        heads, inner = Key("mamba_n_heads", default=128).read(hf), width.read(hf)
        size = inner // heads if hf.get("mamba_d_head", "auto") == "auto" else Key("mamba_d_head").read(hf)
        if size * heads != inner:
            raise DataError(
                f"config.json: mamba_d_head={size} times mamba_n_heads={heads} is not {inner}, the width of the Mamba "
                "layers."
            )
        return int(size)

    def write(size: int, arch: Architecture) -> dict[str, Any]:
        return {"mamba_d_head": size, **write_width(size * arch.setting("mamba2.num_heads"), arch)}

    return Derived(read, write)


def write_expansion(inner: int, arch: Architecture, key: str = "mamba_expand") -> dict[str, Any]:
    expand, rest = divmod(inner, arch.hidden_size)
    if rest:
        raise UsageError(
            f"{arch.family}: config.json cannot express {inner} channels of Mamba, which are no multiple of the hidden "
            f"size {arch.hidden_size}."
        )
    return {key: expand}


EXPANSION = Key("mamba_expand", default=2, decode=lambda expand, hf: expand * Key("hidden_size").read(hf))
"""Channels of a Mamba layer, a multiple of the hidden size."""


def _read_limit(hf: Mapping[str, Any]) -> tuple[float, float]:
    limit = hf.get("time_step_limit") or (0.0, float("inf"))
    if isinstance(limit, list | tuple):
        limit = [
            float(bound["__float__"]) if isinstance(bound, dict) and "__float__" in bound else bound for bound in limit
        ]
    if (
        not isinstance(limit, list | tuple)
        or len(limit) != 2
        or not all(isinstance(bound, int | float) for bound in limit)
    ):
        raise DataError(f"config.json: time_step_limit must be a list of two numbers, got {limit!r:.60}.")
    return float(limit[0]), float(limit[1])


def _write_limit(limit: tuple[float, float], _arch: Architecture) -> dict[str, Any]:
    upper: Any = limit[1] if limit[1] < float("inf") else {"__float__": "Infinity"}
    return {"time_step_limit": [limit[0], upper]}


TIME_STEP_LIMIT = Derived(_read_limit, _write_limit)
KEYS = {
    "mamba2.num_heads": Key("mamba_n_heads", default=128),
    "mamba2.num_groups": Key("mamba_n_groups", default=1),
    "mamba2.state_size": Key("mamba_d_state", default=256),
    "mamba2.kernel": Key("mamba_d_conv", default=4),
    "mamba2.conv_bias": flag("mamba_conv_bias", True),
    "mamba2.in_bias": flag("mamba_proj_bias"),
    "mamba2.out_bias": flag("mamba_proj_bias"),
}
DERIVED: dict[str, Derived] = {
    "mamba2.head_dim": head_dim(EXPANSION, write_expansion),
    "mamba2.time_step_limit": TIME_STEP_LIMIT,
}
"""Defaults are those of Bamba and Granite 4 in transformers."""


def mixers_by_type(names: Mapping[str, str], default: Callable[[Mapping[str, Any]], Sequence[str]]) -> Derived:
    """``layer_types`` with one mixer for each layer, or ``default`` of the config if it has none.

    Of several names of a mixer, the first is written.
    """

    def read(hf: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
        types, number = hf.get("layer_types") or default(hf), Key("num_hidden_layers").read(hf)
        if not isinstance(types, Sequence) or len(types) != number:
            raise DataError(
                f"config.json: layer_types must list the kind of each of {number} layers, got {types!r:.80}."
            )
        if unknown := sorted({str(kind_name) for kind_name in types} - names.keys()):
            raise UsageError(f"layer_types: {', '.join(unknown)} is not supported; {' and '.join(names)} are.")
        return tuple((names[kind_name],) for kind_name in types)

    def write(_mixers: Sequence[tuple[str, ...]], arch: Architecture) -> dict[str, Any]:
        written = {names[name]: name for name in reversed(list(names))}
        return {"layer_types": [written[mixer] for mixer in single_mixers(arch, *written)]}

    return Derived(read, write)


def single_mixers(arch: Architecture, *allowed: str) -> list[str]:
    """The mixer of each layer; UsageError if a layer has not exactly one of those allowed."""
    layer_mixers = [arch.pattern.mixers_of(layer) for layer in range(arch.num_layers)]
    if other := {mixers for mixers in layer_mixers if len(mixers) != 1 or mixers[0] not in allowed}:
        raise UsageError(f"{arch.family}: config.json cannot express layers with the mixers {sorted(other)}.")
    return [mixer for (mixer,) in layer_mixers]


def without_attention(mixer: str, channels: Key) -> dict[str, Derived]:
    """Fields of models whose layers are all of this mixer, without a feed-forward block.

    The sizes of attention and feed-forward blocks have no effect; tensor parallelism divides them like ``channels``.
    """

    def layers(hf: Mapping[str, Any]) -> range:
        return range(Key("num_hidden_layers").read(hf))

    def check(_value: Any, arch: Architecture) -> dict[str, Any]:
        single_mixers(arch, mixer)
        if set(range(arch.num_layers)).difference(arch.pattern.layers_without_mlp):
            raise UsageError(f"{arch.family}: config.json cannot express layers with a feed-forward block.")
        return {}

    heads = Derived(lambda hf: math.gcd(channels.read(hf), 64), lambda _heads, _arch: {})
    return {
        "mixers": Derived(lambda hf: ((mixer,),) * len(layers(hf)), check),
        "layers_without_mlp": Derived(lambda hf: tuple(layers(hf)), check),
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "ffn_hidden_size": Derived(channels.read, lambda _width, _arch: {}),
    }


ONE_BLOCK_FIXED = {
    "hidden_act": Fixed(("silu", "swish"), "Mamba is computed with SiLU"),
    "rescale_prenorm_residual": Fixed((False,), "transformers scales the weights whenever it loads them"),
}
ONE_BLOCK_TRAITS: dict[str, Any] = {"position": "none", "kv_channels": 64, "max_position_embeddings": 1 << 20}
"""Traits of these models; the last two have no effect."""
ONE_BLOCK_NAMES = {
    "model.embed_tokens": "backbone.embeddings",
    "model.layers": "backbone.layers",
    "model.norm": "backbone.norm_f",
    "input_layernorm": "norm",
    ".mamba.": ".mixer.",
}
FEED_FORWARD_NAMES = {
    "post_attention_layernorm": "pre_ff_layernorm",
    ".mlp.": ".feed_forward.",
    "model.norm": "model.final_layernorm",
}
"""Names of Bamba, Falcon-H1 and Jamba that differ from those of Llama."""


def time_step_rank(name: str) -> Derived:
    """``auto`` is a sixteenth of the hidden size, rounded up."""

    def read(hf: Mapping[str, Any]) -> int:
        if hf.get(name, "auto") == "auto":
            return -(-int(Key("hidden_size").read(hf)) // 16)
        return int(Key(name).read(hf))

    return Derived(read, lambda rank, _arch: {name: rank})
