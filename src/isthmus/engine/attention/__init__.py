"""Attention of packed sequences: queries, keys and values, rotations, masks, kernels."""
