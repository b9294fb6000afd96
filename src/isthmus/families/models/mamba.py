"""Mamba: a selective state space in every layer, neither attention nor feed-forward blocks."""

from isthmus.families.family import Family, Key
from isthmus.families.rules import decoder, state_space
from isthmus.families.rules.decoder import flag, number
from isthmus.families.rules.rule import renamed

_CHANNELS = Key(
    "intermediate_size", default=None, null=lambda hf: Key("expand", default=2).read(hf) * Key("hidden_size").read(hf)
)

FAMILY = Family(
    name="mamba",
    hf_architecture="MambaForCausalLM",
    keys={
        "num_layers": Key("num_hidden_layers"),
        "hidden_size": Key("hidden_size"),
        "vocab_size": Key("vocab_size"),
        "norm_epsilon": number("layer_norm_epsilon", 1e-5),
        "tie_embeddings": flag("tie_word_embeddings", default=True),
        "init_std": number("initializer_range", 0.1),
        "mamba.inner_size": _CHANNELS,
        "mamba.state_size": Key("state_size", default=16),
        "mamba.kernel": Key("conv_kernel", default=4),
        "mamba.conv_bias": flag("use_conv_bias", default=True),
        "mamba.proj_bias": flag("use_bias"),
    },
    fixed=state_space.ONE_BLOCK_FIXED,
    dropout={},
    traits=state_space.ONE_BLOCK_TRAITS,
    derived=state_space.without_attention("mamba", _CHANNELS)
    | {"mamba.time_step_rank": state_space.time_step_rank("time_step_rank")},
    unadapted=("mixer.out_proj",),
    rules=renamed(
        (*decoder.EMBEDDING, *decoder.INPUT_NORM, *state_space.MAMBA, *decoder.HEAD), state_space.ONE_BLOCK_NAMES
    ),
)
