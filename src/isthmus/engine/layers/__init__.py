"""The layers of a decoder in plain PyTorch."""
