"""One data-only file per model family, the rule algebra they are written in, and the registry that finds them."""
