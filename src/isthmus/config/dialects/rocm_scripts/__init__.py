"""Variables of the ROCm Megatron-LM training scripts, translated to Isthmus settings."""
