"""GPT-J: parallel attention and MLP, interleaved rotary embedding of some channels, a bias in the output layer."""

from collections.abc import Mapping
from typing import Any

from isthmus.errors import DataError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Derived, Family, Key, dropout_rates
from isthmus.families.models import gpt2
from isthmus.families.rules import decoder
from isthmus.families.rules.rule import renamed

NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.layers": "transformer.h",
    "input_layernorm": "ln_1",
    "self_attn.o_proj": "attn.out_proj",
    "self_attn": "attn",
    "mlp.up_proj": "mlp.fc_in",
    "mlp.down_proj": "mlp.fc_out",
    "model.norm": "transformer.ln_f",
}


def _share(hf: Mapping[str, Any]) -> float:
    width, rotated = hf["n_embd"] // hf["n_head"], Key("rotary_dim", default=64).read(hf)
    if rotated % 2 or rotated > width or int(width * (rotated / width)) != rotated:
        raise DataError(f"config.json: rotary_dim={rotated} must be an even number up to the head dim {width}.")
    return float(rotated / width)


def _rotated(share: float, arch: Architecture) -> dict[str, Any]:
    return {"rotary_dim": int(arch.attention.kv_channels * share)}


FAMILY = Family(
    name="gptj",
    hf_architecture="GPTJForCausalLM",
    keys=dict(gpt2.FAMILY.keys)
    | {
        "max_position_embeddings": Key("n_positions", default=2048),
        "tie_embeddings": decoder.flag("tie_word_embeddings"),
    },
    derived=dict(gpt2.FAMILY.derived) | {"rotary_percent": Derived(_share, _rotated)},
    traits={
        "rotary_base": 10000.0,
        "rotary_interleaved": True,
        "normalization": "LayerNorm",
        "form": "parallel",
        "gated": False,
        "mlp_bias": True,
        "output_bias": True,
    },
    fixed={"pruned_heads": decoder.FIXED["pruned_heads"]},
    dropout=dropout_rates(attention="attn_pdrop", hidden="resid_pdrop", embedding="embd_pdrop"),
    rules=renamed((*decoder.EMBEDDING, *decoder.INPUT_NORM, *decoder.ATTENTION, *decoder.MLP, *decoder.HEAD), NAMES),
    ignorable=("attn.bias", "attn.masked_bias", "attn.embed_positions"),
)
