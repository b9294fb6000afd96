"""Layers behind the last, which predict the token after the next (multi-token prediction, arXiv 2412.19437).

They are kept through conversions. A config counts them even where the weights have none, as in what transformers saves,
so that :meth:`isthmus.families.family.Family.to_architecture` looks at the tensors that are there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from isthmus.families.family import Key
from isthmus.families.rules.rule import Part, Rule, copy

_HERE, _HF_HERE = "decoder.layers.{layer}.", "model.layers.{layer}."
_AHEAD, _HF_AHEAD = "mtp.layers.{ahead}.", "model.layers.{ahead}."

KEY = Key("num_nextn_predict_layers", default=1, null=lambda hf: 0, least=0, aliases=("num_mtp_layers",))


def ahead(layer: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rules of the layers ahead, whose inner layer is like the last of the others, which has experts."""
    inner = tuple(
        replace(
            rule,
            canonical=rule.canonical.replace(_HERE, _AHEAD + "transformer_layer."),
            parts=tuple(Part(part.name.replace(_HF_HERE, _HF_AHEAD), part.symbols) for part in rule.parts),
        )
        for rule in layer
        if rule.layers != "dense"
    )
    # The embedding and the head are copies of the model's own, but nothing makes them so: each is kept as it is.
    return (
        copy(_AHEAD + "embed_tokens.weight", _HF_AHEAD + "embed_tokens.weight", "V", "H", shard="vocab"),
        copy(_AHEAD + "enorm.weight", _HF_AHEAD + "enorm.weight", "H", init="ones"),
        copy(_AHEAD + "hnorm.weight", _HF_AHEAD + "hnorm.weight", "H", init="ones"),
        copy(_AHEAD + "eh_proj.weight", _HF_AHEAD + "eh_proj.weight", "H", "2*H", shard="rows"),
        *inner,
        copy(_AHEAD + "final_layernorm.weight", _HF_AHEAD + "shared_head.norm.weight", "H", init="ones"),
        copy(_AHEAD + "output_layer.weight", _HF_AHEAD + "shared_head.head.weight", "V", "H", shard="vocab"),
    )
