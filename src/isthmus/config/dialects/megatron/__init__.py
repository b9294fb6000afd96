"""Translates Megatron-LM's arguments, of core_v0.16.1 and of earlier releases."""
