"""Measures the training step of configs in a grid of settings."""
