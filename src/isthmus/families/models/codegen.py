"""CodeGen: GPT-J with query, value and key in one tensor, four times one after another, of a quarter of the heads."""

from collections.abc import Mapping
from typing import Any

from isthmus.errors import DataError
from isthmus.families.family import Derived, Family
from isthmus.families.models import gptj
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import LAYER
from isthmus.families.rules.rule import qkv, renamed

_PARTS = 4
_FUSED = ("model.layers.{layer}.self_attn.qkv_proj.weight",) * 3


def _head_width(hf: Mapping[str, Any]) -> int:
    hidden, heads = hf["n_embd"], hf["n_head"]
    if heads % _PARTS or hidden % heads:
        raise DataError(f"config.json: n_head={heads} must be a multiple of {_PARTS}, and divide n_embd={hidden}.")
    return int(hidden // heads)


FAMILY = Family(
    name="codegen",
    hf_architecture="CodeGenForCausalLM",
    keys=gptj.FAMILY.keys,
    derived=dict(gptj.FAMILY.derived) | {"kv_channels": Derived(_head_width, lambda _width, _arch: {})},
    traits=gptj.FAMILY.traits,
    fixed=gptj.FAMILY.fixed,
    dropout=gptj.FAMILY.dropout,
    rules=renamed(
        (
            *decoder.EMBEDDING,
            *decoder.INPUT_NORM,
            qkv(LAYER + "self_attention.linear_qkv.weight", *_FUSED, "H", hf_strands=str(_PARTS), hf_order=(0, 2, 1)),
            decoder.PROJECTION,
            *decoder.MLP,
            *decoder.HEAD,
        ),
        gptj.NAMES,
    ),
    ignorable=("attn.causal_mask", *gptj.FAMILY.ignorable),
)
