"""Records to token sequences with loss masks."""
