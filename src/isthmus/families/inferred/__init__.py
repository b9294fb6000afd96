"""Families that ``isthmus convert --learn`` inferred: they are read from JSON files, which runs no code."""
