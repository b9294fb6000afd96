"""Translates the variables of ROCm Megatron-LM's training scripts."""
