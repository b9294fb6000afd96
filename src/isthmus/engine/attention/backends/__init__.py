"""Causal attention over packed samples: one function for each kernel of PyTorch, and the choice between them."""
