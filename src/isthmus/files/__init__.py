"""Files and folders: atomic writes, locks, bounded input, checksums."""
