"""The families of `make unit` together have every kind of block."""

from __future__ import annotations

from isthmus.families.blocks.attention import Attention
from isthmus.families.blocks.feed_forward import Experts, Mlp
from isthmus.families.blocks.kinds import MIXER_KINDS
from isthmus.families.blocks.latent_attention import LatentAttention
from isthmus.families.registry import all_families
from ranks.tiny import tiny_config
from sweep import BLOCK_FAMILIES


def test_every_kind_of_block_is_in_a_family_of_make_unit() -> None:
    families = all_families()
    architectures = [families[name].to_architecture(tiny_config(name).to_dict()) for name in BLOCK_FAMILIES]
    layers = [layer for arch in architectures for layer in arch.all_layers]
    mixers = [mixer for layer in layers for mixer in layer.mixers]
    assert {mixer.kind for mixer in mixers} == {*MIXER_KINDS}
    assert {type(mixer) for mixer in mixers} >= {Attention, LatentAttention}
    assert {type(layer.feed_forward) for layer in layers} == {Experts, Mlp, type(None)}
    assert {"indexed", "windowed"} <= {kind for layer in layers for kind in layer.kinds}
    assert any(families[name].nested is not None for name in BLOCK_FAMILIES)
