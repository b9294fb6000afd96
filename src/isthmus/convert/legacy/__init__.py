"""Megatron-LM's legacy ``mp_rank_XX`` checkpoints and their args."""
