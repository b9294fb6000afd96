"""From a config to a finished run: one recipe a page."""
