"""Workarounds for defects of megatron.core, and the adapter that runs it on a CPU."""
