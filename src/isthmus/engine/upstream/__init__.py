"""Workarounds for megatron.core defects, and the adapter for CPUs."""
