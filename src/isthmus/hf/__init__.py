"""The only door to the Hugging Face world: folders, tensors on disk, tokenizers."""
