"""The decoder: embedding, layers, MTP layers and head, and the parameters of a live model."""
