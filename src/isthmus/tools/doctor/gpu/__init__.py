"""Checks of GPUs, of their drivers and of what torch does with them."""
