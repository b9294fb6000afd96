"""Checkpoints of a run in the ``torch_dist`` format."""
