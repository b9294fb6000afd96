"""StarCoder and SantaCoder: GPT-2 with one key and value head, and weights stored as [out, in]."""

from isthmus.families.family import Family, Key
from isthmus.families.models import gpt2
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import in_layer
from isthmus.families.rules.rule import renamed

_QKV, _HF_QKV = "self_attention.linear_qkv.", "attn.c_attn."
_ATTENTION = (
    # As in Megatron-Core, the rows of query, key and value are grouped by key head.
    in_layer(_QKV + "weight", _HF_QKV + "weight", "W", "H", shard="heads"),
    in_layer(_QKV + "bias", _HF_QKV + "bias", "W", shard="heads", init="zeros"),
    decoder.PROJECTION,
    decoder.PROJECTION_BIAS,
)

FAMILY = Family(
    name="gpt_bigcode",
    hf_architecture="GPTBigCodeForCausalLM",
    keys=dict(gpt2.FAMILY.keys)
    | {
        "activation": decoder.activation("activation_function", default="gelu_pytorch_tanh"),
        "num_query_groups": Key(
            "multi_query",
            kind=bool,
            default=True,
            decode=lambda shared, hf: 1 if shared else hf["n_head"],
            encode=lambda groups, _: groups == 1,
        ),
    },
    derived=gpt2.FAMILY.derived,
    traits=gpt2.FAMILY.traits,
    fixed={
        "scale_attn_weights": gpt2.FAMILY.fixed["scale_attn_weights"],
        "add_cross_attention": gpt2.FAMILY.fixed["add_cross_attention"],
        "pruned_heads": decoder.FIXED["pruned_heads"],
    },
    dropout=gpt2.FAMILY.dropout,
    rules=renamed(
        (*decoder.pre_norm_rules(attention=_ATTENTION), gpt2.POSITIONS),
        gpt2.NAMES | {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
    ),
    ignorable=gpt2.FAMILY.ignorable,
)
