"""Gemma 4 and its unified models, with the rules and settings that no other family has."""
