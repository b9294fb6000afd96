"""Samples to packed micro batches."""
