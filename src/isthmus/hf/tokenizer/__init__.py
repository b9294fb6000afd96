"""Hugging Face tokenizers with what training needs."""
