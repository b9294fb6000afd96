"""Results and progress bars on the terminal, and signals while files are written."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from isthmus.errors import escaped, printable
from isthmus.train.terminal_lines import width_of, wrapped


def say(text: str, *, end: str = "\n", exact: bool = False) -> None:
    """Print text for people to stdout; control characters, as in names of a file, are escaped.

    An ``exact`` text, such as a config, is escaped on a terminal only.
    """
    if exact:
        shown = escaped(text) if sys.stdout.isatty() else text
    else:
        shown = printable(text)
    print(shown, end=end, flush=True)


def show(result: Any, *, as_json: bool) -> None:
    """Print a result, a mapping or with ``as_dict``, to stdout, as JSON or one value per line."""
    values: Mapping[str, Any] = result if isinstance(result, Mapping) else result.as_dict()
    if as_json:
        print(json.dumps(values), flush=True)
        return
    width = max(map(len, values), default=0)
    for name, value in values.items():
        if value is None or value == []:
            continue
        label = name.replace("_", " ")
        for item in value if isinstance(value, list) else [value]:
            say(f"{label:<{width}}  {_text(item, name)}")
            label = ""


def _text(value: Any, name: str) -> str:
    """``value`` as people read it; the unit in its ``name`` decides how it is rounded."""
    if isinstance(value, tuple):
        return ", ".join(_text(item, name) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    digits = ".2f" if name.endswith("_gib") else ".0f" if name.endswith("_per_s") else ".6g"
    return f"{value:,{digits}}"


def note(text: str) -> None:
    """Print text like :func:`say` to stderr, with line ends between words on a terminal; it may be closed."""
    with contextlib.suppress(OSError):
        print(wrapped(printable(text), width_of(sys.stderr)), file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Bytes and rate on stderr if it is a terminal; yields ``update(done_bytes, total_bytes)``."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP raises KeyboardInterrupt in the block; later ones are ignored."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(*_: object) -> None:
        for number in numbers:  # batch systems send it twice, and so do users
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
