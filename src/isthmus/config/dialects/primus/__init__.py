"""Primus' experiments with their model files, on its Megatron backend, in the settings of a run."""
