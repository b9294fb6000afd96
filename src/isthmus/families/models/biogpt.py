"""BioGPT: learned positions, LayerNorms, scaled embeddings, biases in all linear layers."""

from collections.abc import Mapping
from typing import Any

from isthmus.families.family import Derived, Family, Fixed, Key, dropout_rates, with_defaults, without
from isthmus.families.models import opt
from isthmus.families.rules import decoder
from isthmus.families.rules.rule import renamed


def _scale(hf: Mapping[str, Any]) -> float:
    return float(hf["hidden_size"] ** 0.5) if hf.get("scale_embedding", True) else 1.0


FAMILY = Family(
    name="biogpt",
    hf_architecture="BioGptForCausalLM",
    keys=with_defaults(
        without(decoder.KEYS, "kv_channels", "norm_epsilon"), max_position_embeddings=1024, tie_word_embeddings=True
    )
    | {"num_query_groups": Key("num_attention_heads"), "activation": decoder.activation("hidden_act", default="gelu")},
    derived={
        "kv_channels": decoder.HEAD_DIM,
        "embedding_multiplier": Derived(_scale, lambda scale, _arch: {"scale_embedding": scale != 1}),
    },
    # The class does not read layer_norm_eps.
    traits=decoder.BIASED | dict(opt.FAMILY.traits),
    fixed=decoder.PLAIN_FIXED
    | {
        "layerdrop": opt.LAYERDROP,
        "activation_dropout": Fixed((0.0,), "dropout within the feed-forward block is not supported", training=True),
    },
    dropout=dropout_rates(
        0.1, attention="attention_probs_dropout_prob", hidden="hidden_dropout_prob", embedding="hidden_dropout_prob"
    ),
    rules=renamed(
        (decoder.POSITIONS, *decoder.RULES),
        opt.NAMES | {"model.norm": "model.layer_norm", "model.": "biogpt.", "lm_head": "output_projection"},
    ),
)
