"""Data files to records."""
