"""``isthmus demo``."""

from __future__ import annotations

import signal
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from isthmus.cli.run_recipe import Debug, Json, show


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for everything it makes.")] = Path("isthmus-demo"),
    nproc: Annotated[int, typer.Option(min=1, metavar="N", help="Ranks to train with.")] = 2,
    debug: Debug = False,
    json: Json = False,
) -> int:
    """Show the whole way on this machine: build a small model, train it, export it, let it answer. No network."""
    from isthmus.demo.run_demo import run

    # The commands it runs are children of this process and have to be told before it goes.
    signal.signal(signal.SIGTERM, _terminated)
    # With --json, stdout is the result's alone.
    result = run(out, nproc=nproc, say=partial(print, file=sys.stderr if json else sys.stdout, flush=True))
    show(result, as_json=json)
    return 0


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
