"""Records to conversations, and conversations to text with the spans that have loss."""
