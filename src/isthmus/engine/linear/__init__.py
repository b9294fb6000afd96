"""Linear layers and their matmuls: tensor-parallel, FP8, quantized weights."""
