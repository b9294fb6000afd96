"""Translates the settings of other programs."""
