"""Data of a run: sources, tokenization, resuming, and opening prepared files."""
