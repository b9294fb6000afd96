"""From Hugging Face tensors to one rank's live tensors and back, by the table of the family."""
