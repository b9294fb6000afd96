"""Multi-token prediction (MTP, arXiv 2412.19437): layers after the last one that predict the token after the next.

A config counts MTP layers even if the checkpoint has no tensors for them, as in what transformers saves, so
:meth:`isthmus.families.family.Family.to_architecture` also checks the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from isthmus.families.family import Key
from isthmus.families.rules.decoder import HF_LAYER, LAYER
from isthmus.families.rules.rule import HfPart, Rule, copy

_MTP, _HF_MTP = "mtp.layers.{mtp}.", "model.layers.{mtp}."

_COPY = re.compile(r"mtp\.(?!.*\.transformer_layer\.).*(embed_tokens|output_layer)\.weight$")

KEY = Key("num_nextn_predict_layers", default=1, null=lambda hf: 0, least=0, aliases=("num_mtp_layers",))


def is_mtp_copy(canonical: str) -> bool:
    """Whether this tensor of an MTP layer is a copy of the model's embedding or output layer, which training shares."""
    return _COPY.match(canonical) is not None


def mtp_rules(layer: Iterable[Rule], *, copies: bool = True) -> tuple[Rule, ...]:
    """Each MTP layer contains a decoder layer like the model's last one, with experts.

    With ``copies`` the files also have the model's embedding and output layer for each of them.
    """
    inner = tuple(
        replace(
            rule,
            canonical=rule.canonical.replace(LAYER, _MTP + "transformer_layer."),
            parts=tuple(HfPart(part.name.replace(HF_LAYER, _HF_MTP), part.symbols) for part in rule.parts),
        )
        for rule in layer
        if rule.layers != "dense"
    )
    # The embedding and the head are copies of the model's, but nothing keeps them equal, so each is converted.
    embedding = copy(_MTP + "embed_tokens.weight", _HF_MTP + "embed_tokens.weight", "V", "H", shard="vocab")
    output = copy(_MTP + "output_layer.weight", _HF_MTP + "shared_head.head.weight", "V", "H", shard="vocab")
    return (
        *((embedding,) if copies else ()),
        copy(_MTP + "enorm.weight", _HF_MTP + "enorm.weight", "H", init="ones"),
        copy(_MTP + "hnorm.weight", _HF_MTP + "hnorm.weight", "H", init="ones"),
        copy(_MTP + "eh_proj.weight", _HF_MTP + "eh_proj.weight", "H", "2*H", shard="rows"),
        *inner,
        copy(_MTP + "final_layernorm.weight", _HF_MTP + "shared_head.norm.weight", "H", init="ones"),
        *((output,) if copies else ()),
    )
