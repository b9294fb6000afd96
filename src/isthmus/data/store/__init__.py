"""Tokenized samples: indexed files, views of them, splits and mixtures."""
