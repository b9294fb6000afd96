"""The processes of the GPU benchmarks."""
