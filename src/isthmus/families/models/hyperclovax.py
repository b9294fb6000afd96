"""HyperCLOVA X: Granite with optional norms after attention and MLP, and a multiplier of the logits."""

from isthmus.families.family import Family, Key
from isthmus.families.models import granite
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import layer_norm, number
from isthmus.families.rules.rule import where

FAMILY = Family(
    name="hyperclovax",
    hf_architecture="HyperCLOVAXForCausalLM",
    keys=dict(granite.FAMILY.keys)
    | {
        "attention_scale": number("attention_multiplier", None),
        "logits_multiplier": number("logits_scaling", 1.0),
        "form": Key("use_post_norm", default=True, choices={True: "sandwich", False: "pre"}),
    },
    fixed=decoder.FIXED,
    rules=decoder.pre_norm_rules(
        attention=(*decoder.ATTENTION, *where("form=sandwich", *layer_norm("post_self_attn_layernorm", "post_norm1"))),
        mlp=(*decoder.MLP, *where("form=sandwich", *layer_norm("post_mlp_layernorm", "post_norm2"))),
    ),
)
