"""MiMo-7B: Qwen2's tensors and keys, and an MTP layer. transformers has no class of it."""

from dataclasses import replace

from isthmus.families.family import Fixed
from isthmus.families.models import qwen2
from isthmus.families.rules import decoder, mtp
from isthmus.families.rules.rule import renamed

_LAYER = (*decoder.INPUT_NORM, *decoder.ATTENTION, *decoder.MLP_NORM, *decoder.MLP)
_PLACE = "model.mtp_layers.{depth}."
_NAMES = {
    mtp.HF_MTP: _PLACE,
    _PLACE + "enorm": _PLACE + "token_layernorm",
    _PLACE + "hnorm": _PLACE + "hidden_layernorm",
    _PLACE + "eh_proj": _PLACE + "input_proj",
    _PLACE + "shared_head.norm": _PLACE + "final_layernorm",
}

FAMILY = replace(
    qwen2.FAMILY,
    name="mimo",
    hf_architecture="MiMoForCausalLM",
    keys={**qwen2.FAMILY.keys, "mtp_layers": replace(mtp.KEY, default=0)},
    fixed={
        **qwen2.FAMILY.fixed,
        "use_sliding_window": Fixed((False,), "sliding windows are not supported for this family"),
    },
    traits={**qwen2.FAMILY.traits, "mtp_hidden_first": True},
    own_code=True,
    rules=(*decoder.EMBEDDING, *_LAYER, *renamed(mtp.mtp_rules(_LAYER, copies=False), _NAMES), *decoder.HEAD),
)
