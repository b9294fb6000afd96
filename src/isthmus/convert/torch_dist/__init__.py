"""Megatron-Core's ``torch_dist`` checkpoints, without a model or process group."""
