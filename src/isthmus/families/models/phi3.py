"""Phi-3 and Phi-4, dense: Llama with projections that lie in one tensor, LongRoPE, heads rotated in part."""

from isthmus.families.family import Family, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.rule import qkv

_QKV = "model.layers.{layer}.self_attn.qkv_proj.weight"

FAMILY = Family(
    name="phi3",
    hf_architecture="Phi3ForCausalLM",
    keys=decoder.KEYS
    | {
        "max_position_embeddings": Key("max_position_embeddings", default=4096),
        "norm_epsilon": Key("rms_norm_eps", kind=float, default=1e-5),
    },
    fixed=decoder.FIXED | {"resid_pdrop": decoder.NO_DROPOUT, "embd_pdrop": decoder.NO_DROPOUT},
    sliding_window="always",
    # Beside the rotary settings, where the original length also stands, the config has it once more, and that wins.
    rope_defaults={"original_max_position_embeddings": 4096, "partial_rotary_factor": 1.0},
    rules=(
        *decoder.EMBEDDING,
        *decoder.INPUT_NORM,
        qkv("decoder.layers.{layer}.self_attention.linear_qkv.weight", _QKV, _QKV, _QKV, "H"),
        decoder.ATTENTION[1],
        *decoder.FUSED_GATED_MLP,
        *decoder.HEAD,
    ),
    ignorable=decoder.IGNORABLE,
)
