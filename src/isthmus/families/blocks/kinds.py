"""Every kind of block. A new kind is a file beside this one, and a line here."""

from __future__ import annotations

from isthmus.families.blocks.block import Recurrence
from isthmus.families.blocks.delta_net import DeltaNet
from isthmus.families.blocks.mamba import Mamba
from isthmus.families.blocks.mamba2 import Mamba2
from isthmus.families.blocks.short_convolution import ShortConvolution

RECURRENCES: tuple[type[Recurrence], ...] = (DeltaNet, Mamba2, Mamba, ShortConvolution)
"""Mixers other than attention."""
MIXER_KINDS: tuple[str, ...] = ("attention", *(kind for block in RECURRENCES for kind in block.kinds))
"""Names in ``mixers`` of an architecture."""
