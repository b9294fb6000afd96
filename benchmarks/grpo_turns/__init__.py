"""Contestants of the GRPO benchmark."""
