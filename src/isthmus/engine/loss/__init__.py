"""Losses and objectives: cross entropy of the output projection, distillation, preferences, scores."""
