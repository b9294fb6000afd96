"""Data files to batches: formats -> records -> chats -> samples -> packing -> micro batches."""
