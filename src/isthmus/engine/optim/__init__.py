"""The optimizer, its learning-rate schedule and its offload to CPU memory."""
