"""MiniCPM3: multi-head latent attention, multipliers of embeddings, residuals and logits."""

from collections.abc import Mapping
from typing import Any

from isthmus.families.architecture import Architecture
from isthmus.families.family import Derived, Family, Key, with_defaults
from isthmus.families.rules import decoder, mla
from isthmus.families.rules.decoder import flag, number


def _residual(hf: Mapping[str, Any]) -> float:
    depth = number("scale_depth", 1.4).read(hf) if hf.get("scale_depth", 1.4) is not None else None
    return 1.0 if depth is None else depth / hf["num_hidden_layers"] ** 0.5


def _depth(multiplier: float, arch: Architecture) -> dict[str, Any]:
    return {"scale_depth": multiplier * arch.num_layers**0.5}


def _logits(hf: Mapping[str, Any]) -> float:
    base = Key("dim_model_base", default=256, null=lambda hf: hf["hidden_size"]).read(hf)
    return float(base / hf["hidden_size"])


FAMILY = Family(
    name="minicpm3",
    hf_architecture="MiniCPM3ForCausalLM",
    keys=with_defaults(
        mla.KEYS, max_position_embeddings=32768, rms_norm_eps=1e-5, tie_word_embeddings=True, initializer_range=0.1
    )
    | {
        "mla.q_lora_rank": Key("q_lora_rank", default=768, optional=True),
        "mla.kv_lora_rank": Key("kv_lora_rank", default=256),
        "mla.qk_nope_head_dim": Key("qk_nope_head_dim", default=64),
        "mla.qk_rope_head_dim": Key("qk_rope_head_dim", default=32),
        "mla.v_head_dim": Key(
            "v_head_dim", default=None, null=lambda hf: hf["hidden_size"] // hf["num_attention_heads"]
        ),
        "mlp_bias": flag("mlp_bias"),
        "embedding_multiplier": number("scale_emb", 12.0),
    },
    fixed=decoder.FIXED | {"attention_bias": mla.FIXED["attention_bias"]},
    derived={
        **mla.DERIVED,
        "residual_multiplier": Derived(_residual, _depth),
        "logits_multiplier": Derived(
            _logits, lambda multiplier, arch: {"dim_model_base": round(multiplier * arch.hidden_size)}
        ),
    },
    rules=decoder.pre_norm_rules(attention=mla.ATTENTION),
)
