"""Invertible tensor rules, their slicing, and what families share."""
