"""Mixers of tokens besides attention."""
