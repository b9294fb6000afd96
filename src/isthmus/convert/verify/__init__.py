"""Comparison of two models on disk: tensors and logits."""
