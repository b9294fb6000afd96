"""Ling 2 under a model type of its own, with the same keys and tensors as ``bailing_moe``."""

from dataclasses import replace

from isthmus.families.models import bailing_moe

FAMILY = replace(bailing_moe.FAMILY, name="bailing_moe_v2")
