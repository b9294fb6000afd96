"""The safetensors format: slices read, files written in parallel, quantized weights."""
