"""Multi-token prediction (MTP, arXiv 2412.19437): layers after the last one that predict the token after the next.

A config counts MTP layers even if the checkpoint has no tensors for them, as in what transformers saves, so
:meth:`isthmus.families.family.Family.to_architecture` also checks the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from isthmus.families.config_keys import Key
from isthmus.families.rules.decoder import HF_LAYER, LAYER
from isthmus.families.rules.rule import HfPart, Rule, copy

_MTP, HF_MTP = "mtp.layers.{mtp}.", "model.layers.{mtp}."

_COPY = re.compile(r"mtp\.(?!.*\.transformer_layer\.).*(embed_tokens|output_layer)\.weight$")

KEY = Key("num_nextn_predict_layers", default=1, null=lambda hf: 0, least=0, aliases=("num_mtp_layers",))


def is_mtp_copy(canonical: str) -> bool:
    """Whether this tensor of an MTP layer is a copy of the model's embedding or output layer, which training shares."""
    return _COPY.match(canonical) is not None


ENTRY = (
    copy(_MTP + "enorm.weight", HF_MTP + "enorm.weight", "H", init="ones"),
    copy(_MTP + "hnorm.weight", HF_MTP + "hnorm.weight", "H", init="ones"),
    copy(_MTP + "eh_proj.weight", HF_MTP + "eh_proj.weight", "H", "2*H", shard="rows"),
)
"""What joins the embedding of a token and the hidden state of the one before."""
FINAL_NORM = (copy(_MTP + "final_layernorm.weight", HF_MTP + "shared_head.norm.weight", "H", init="ones"),)


def inner_rules(layer: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rules of the decoder layer in an MTP layer: like the model's last one, with experts if the model has them."""
    return tuple(
        replace(
            rule,
            canonical=rule.canonical.replace(LAYER, _MTP + "transformer_layer."),
            parts=tuple(HfPart(part.name.replace(HF_LAYER, HF_MTP), part.symbols) for part in rule.parts),
        )
        for rule in layer
        if rule.layers != "dense"
    )


def mtp_rules(layer: Iterable[Rule], *, copies: bool = True) -> tuple[Rule, ...]:
    """The rules of MTP layers; with ``copies`` the files also have the model's embedding and head for each of them."""
    computed = (*ENTRY, *inner_rules(layer), *FINAL_NORM)
    if not copies:
        return computed
    # Nothing keeps the copies equal, so each is converted.
    return (
        copy(_MTP + "embed_tokens.weight", HF_MTP + "embed_tokens.weight", "V", "H", shard="vocab"),
        *computed,
        copy(_MTP + "output_layer.weight", HF_MTP + "shared_head.head.weight", "V", "H", shard="vocab"),
    )
