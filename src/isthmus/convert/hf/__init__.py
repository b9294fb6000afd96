"""Hugging Face folders as source and destination of a conversion."""
