"""What is known about this process of the command line, for the code that ends it."""

from __future__ import annotations

from pathlib import Path

argv: list[str] = []
"""The words after ``isthmus``."""
run_folder: Path | None = None
"""Where the run writes, once the config is known."""
started_by_isthmus = False
"""Whether this is a rank that ``--nproc`` started."""
