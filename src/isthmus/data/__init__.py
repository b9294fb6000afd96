"""From files to batches: formats -> records -> chat -> samples -> packing -> micro batches; numpy and torch only."""
