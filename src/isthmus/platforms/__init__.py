"""Capabilities, environment defaults and peak FLOP/s of CPU, CUDA and ROCm."""
