"""The demo: its corpus and its run."""
