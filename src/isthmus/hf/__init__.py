"""Hugging Face model folders, tensors on disk, tokenizers, the Hub; no other package imports these libraries."""
