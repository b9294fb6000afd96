"""Mamba-2: heads with a state space in every layer, neither attention nor feed-forward blocks."""

from collections.abc import Mapping
from typing import Any

from isthmus.errors import DataError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Derived, Family, Key
from isthmus.families.rules import decoder, state_space
from isthmus.families.rules.decoder import flag, number
from isthmus.families.rules.rule import renamed

_HEADS, _WIDTH, _EXPAND = Key("num_heads", default=128), Key("head_dim", default=64), Key("expand", default=2)


def _read_width(hf: Mapping[str, Any]) -> int:
    heads, width, channels = _HEADS.read(hf), int(_WIDTH.read(hf)), _EXPAND.read(hf) * Key("hidden_size").read(hf)
    if heads * width != channels:
        raise DataError(
            f"config.json: num_heads={heads} times head_dim={width} must be expand times hidden_size, {channels}."
        )
    return width


def _write_width(width: int, arch: Architecture) -> dict[str, Any]:
    return {"head_dim": width} | state_space.write_expansion(width * arch.setting("mamba2.num_heads"), arch, "expand")


FAMILY = Family(
    name="mamba2",
    hf_architecture="Mamba2ForCausalLM",
    keys={
        "num_layers": Key("num_hidden_layers"),
        "hidden_size": Key("hidden_size"),
        "vocab_size": Key("vocab_size"),
        "norm_epsilon": number("layer_norm_epsilon", 1e-5),
        "tie_embeddings": flag("tie_word_embeddings"),
        "init_std": number("initializer_range", 0.1),
        "mamba2.num_heads": _HEADS,
        "mamba2.num_groups": Key("n_groups", default=8),
        "mamba2.state_size": Key("state_size", default=128),
        "mamba2.kernel": Key("conv_kernel", default=4),
        "mamba2.conv_bias": flag("use_conv_bias", default=True),
        "mamba2.in_bias": flag("use_bias"),
        "mamba2.out_bias": flag("use_bias"),
    },
    fixed=state_space.ONE_BLOCK_FIXED,
    dropout={},
    traits=state_space.ONE_BLOCK_TRAITS,
    derived=state_space.without_attention("mamba2", _HEADS)
    | {"mamba2.head_dim": Derived(_read_width, _write_width), "mamba2.time_step_limit": state_space.TIME_STEP_LIMIT},
    unadapted=("mixer.out_proj",),
    rules=renamed(
        (*decoder.EMBEDDING, *decoder.INPUT_NORM, *state_space.MAMBA2, *decoder.HEAD), state_space.ONE_BLOCK_NAMES
    ),
)
