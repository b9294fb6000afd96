"""Inference of families (``convert --learn``) with small random models."""
