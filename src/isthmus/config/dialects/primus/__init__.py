"""Translates Primus experiments with the Megatron backend."""
