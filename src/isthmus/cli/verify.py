"""``isthmus verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.train import Debug, Json, show
from isthmus.cli.transfer import Bin, HfLike, progress_bar


def verify(
    first: Annotated[Path, typer.Argument(metavar="A", help="Hugging Face folder or Megatron checkpoint.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The one to compare it with.")],
    hf_like: HfLike = None,
    bin: Bin = False,
    debug: Debug = False,
    json: Json = False,
) -> int:
    """Compare two models bit by bit, in whichever formats; exit code 1 if they differ."""
    from isthmus.convert.verify import verify as run

    with progress_bar("comparing") as progress:
        found = run(first, second, hf_like=hf_like, bin=bin, progress=progress)
    show(found, as_json=json)
    return 0
