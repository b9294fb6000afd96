"""Batching: samples to packed micro batches."""
