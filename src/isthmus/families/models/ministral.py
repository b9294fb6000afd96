"""Ministral: Mistral with sliding-window attention in some layers."""

from dataclasses import replace

from isthmus.families.models import mistral
from isthmus.families.rules import decoder

FAMILY = replace(
    mistral.FAMILY,
    name="ministral",
    hf_architecture="MinistralForCausalLM",
    fixed=decoder.FIXED,
    sliding_window="listed",
)
