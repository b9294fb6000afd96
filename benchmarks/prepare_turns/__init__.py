"""The contestants of the tokenization benchmark."""
