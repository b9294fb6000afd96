"""Everything known before a model is built: layout, memory, checks, run record."""
