"""GPT-Neo: learned positions, unscaled attention scores, layers with and without a sliding window."""

from collections.abc import Mapping
from typing import Any

from isthmus.errors import DataError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Derived, Family, Key, dropout_rates
from isthmus.families.models import gpt2
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag, number
from isthmus.families.rules.rule import renamed

_GLOBAL, _LOCAL = "global", "local"


def _kinds(hf: Mapping[str, Any]) -> list[str]:
    types = hf.get("attention_types")
    try:
        kinds = [kind for pattern, times in types or [[[_GLOBAL, _LOCAL], 12]] for kind in list(pattern) * times]
    except (TypeError, ValueError):
        raise DataError(
            f"config.json: attention_types must be pairs of kinds and a number, got {types!r:.80}."
        ) from None
    if len(kinds) != hf["num_layers"] or not {*kinds} <= {_GLOBAL, _LOCAL}:
        raise DataError(
            f"config.json: attention_types must be {_GLOBAL} or {_LOCAL} for each of {hf['num_layers']} layers, got "
            f"{kinds!r:.80}."
        )
    return kinds


def _window(hf: Mapping[str, Any]) -> int | None:
    return Key("window_size", default=256).read(hf) if _LOCAL in _kinds(hf) else None


def _full(hf: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(layer for layer, kind in enumerate(_kinds(hf)) if kind == _GLOBAL) if _LOCAL in _kinds(hf) else ()


def _write(_full: tuple[int, ...], arch: Architecture) -> dict[str, Any]:
    kinds = [_GLOBAL if arch.windows.of(layer) is None else _LOCAL for layer in range(arch.num_layers)]
    return {"attention_types": [[kinds, 1]], "attention_layers": kinds}


FAMILY = Family(
    name="gpt_neo",
    hf_architecture="GPTNeoForCausalLM",
    keys={
        "num_layers": Key("num_layers"),
        "hidden_size": Key("hidden_size"),
        "ffn_hidden_size": Key("intermediate_size", null=lambda hf: 4 * hf["hidden_size"], default=None),
        "num_attention_heads": Key("num_heads"),
        "num_query_groups": Key("num_heads"),
        "vocab_size": Key("vocab_size"),
        "max_position_embeddings": Key("max_position_embeddings", default=2048),
        "norm_epsilon": number("layer_norm_epsilon", 1e-5),
        "activation": decoder.activation("activation_function", default="gelu_new"),
        "tie_embeddings": flag("tie_word_embeddings", default=True),
        "init_std": number("initializer_range", 0.02),
    },
    derived={
        "kv_channels": Derived(lambda hf: hf["hidden_size"] // hf["num_heads"], lambda _width, _arch: {}),
        "sliding_window": Derived(_window, lambda window, _arch: {} if window is None else {"window_size": window}),
        "full_attention_layers": Derived(_full, _write),
    },
    traits={
        "position": "learned",
        "normalization": "LayerNorm",
        "attention_scale": 1.0,
        "gated": False,
        "proj_bias": True,
        "mlp_bias": True,
    },
    fixed=decoder.PLAIN_FIXED,
    dropout=dropout_rates(attention="attention_dropout", hidden="resid_dropout", embedding="embed_dropout"),
    rules=renamed(
        (gpt2.POSITIONS, *decoder.RULES),
        gpt2.NAMES
        | {
            "self_attn.o_proj": "attn.attention.out_proj",
            "self_attn": "attn.attention",
            "mlp.up_proj": "mlp.c_fc",
            "mlp.down_proj": "mlp.c_proj",
        },
    ),
    ignorable=("attn.attention.bias", "attn.attention.masked_bias"),
)
