"""nanochat: norms without weights, also of the embeddings, reversed rotations before QK norms, a squared ReLU."""

from isthmus.families.family import Family, with_defaults
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import number
from isthmus.families.rules.rule import renamed

FAMILY = Family(
    name="nanochat",
    hf_architecture="NanoChatForCausalLM",
    keys=with_defaults(decoder.KEYS, max_position_embeddings=2048)
    | decoder.ATTENTION_BIAS
    | {
        "activation": decoder.activation("hidden_act", default="relu2"),
        "logits_softcap": number("final_logit_softcapping", 15.0, optional=True),
    },
    fixed=decoder.PLAIN_FIXED,
    traits={
        "norm_weight": False,
        "embedding_norm": True,
        "qk_norm": True,
        "qk_norm_after_rotation": True,
        "rotary_reversed": True,
        "gated": False,
    },
    rules=renamed(decoder.without_norms(decoder.RULES), {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}),
)
