"""Lines on a terminal, which break between words only."""

from __future__ import annotations

import os
import textwrap
from contextlib import suppress
from typing import TextIO


def width_of(stream: TextIO) -> int:
    """Columns of the terminal that ``stream`` writes to; 0 if it is none."""
    with suppress(OSError, ValueError, AttributeError):  # closed, or without a file
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    return 0


def wrapped(text: str, width: int) -> str:
    """``text`` in lines of ``width`` columns, 0: as it is; a longer word, such as a path, keeps its line."""
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        if 0 < width < len(line)
        else line
        for line in text.split("\n")
    )
