"""``isthmus verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.convert_options import Bin, HfLike, progress_bar
from isthmus.cli.run_recipe import Debug, Json, show
from isthmus.errors import UsageError


def verify(
    first: Annotated[Path, typer.Argument(metavar="A", help="Hugging Face folder or Megatron checkpoint.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The one to compare it with.")],
    hf_like: HfLike = None,
    bin: Bin = False,
    logits: Annotated[
        bool,
        typer.Option("--logits", help="Run both in float32 on the same tokens as well, and compare what they say."),
    ] = False,
    tolerance: Annotated[
        float | None, typer.Option(min=0.0, metavar="X", help="Difference of a logit that counts as none; 1e-4.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, metavar="N", help="Length of a sample of --logits; 64.")] = None,
    layer_by_layer: Annotated[
        bool, typer.Option("--layer-by-layer", help="Hold the weights of one layer at a time, as if memory were short.")
    ] = False,
    debug: Debug = False,
    json: Json = False,
) -> int:
    """Compare two models bit by bit, in whichever formats; exit code 1 if they differ."""
    if not logits and (tolerance is not None or tokens is not None or layer_by_layer):
        raise UsageError("--tolerance, --tokens and --layer-by-layer are about --logits. Give that as well.")
    from isthmus.convert.verify.compare import verify as run
    from isthmus.convert.verify.compare_logits import TOLERANCE, LogitsCheck

    check = LogitsCheck(tolerance=TOLERANCE if tolerance is None else tolerance, tokens=tokens, by_layer=layer_by_layer)
    with progress_bar("comparing") as progress:
        asked = check if logits else None
        found = run(first, second, hf_like=hf_like, bin=bin, logits=asked, progress=progress)
    show(found, as_json=json)
    return 0
