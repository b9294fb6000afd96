"""Low-rank adapters of parallel linear layers, with the meaning of PEFT."""
