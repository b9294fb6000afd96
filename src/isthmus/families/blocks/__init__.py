"""Blocks of a model: sizes, weights, FLOPs, memory and state of each kind, independent of torch and Megatron-Core."""
