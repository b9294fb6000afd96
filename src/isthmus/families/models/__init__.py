"""One data-only file per model family."""
