"""Megatron-LM's arguments, of core_v0.16.1 and of the releases before it, in the settings of a run."""
