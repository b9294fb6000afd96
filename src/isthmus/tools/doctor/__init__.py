"""Checks of this machine and its software: what decides whether and how fast training runs."""
