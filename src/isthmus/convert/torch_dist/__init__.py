"""Megatron-Core's ``torch_dist`` checkpoints, read and written without a model or process group."""
