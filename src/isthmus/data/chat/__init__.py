"""Records to conversations, and conversations to text with loss spans."""
