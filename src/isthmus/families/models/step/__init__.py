"""Step 3.5, with the spellings of its older configs."""
