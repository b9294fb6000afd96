"""Tiny models of families, by what is special about them, with the settings and layouts that prove each."""

from __future__ import annotations

from ranks.tiny_families import delta_net, dense, experts, gemma4, nested, sparse_attention, state_space
from ranks.tiny_families.tiny_family import TinyFamily

TINY_FAMILIES: dict[str, TinyFamily] = {
    **dense.FAMILIES,
    **experts.FAMILIES,
    **sparse_attention.FAMILIES,
    **nested.FAMILIES,
    **gemma4.FAMILIES,
    **delta_net.FAMILIES,
    **state_space.FAMILIES,
}
