"""Safetensors files: reading slices, parallel writing, dequantization."""
