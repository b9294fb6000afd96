"""``isthmus verify``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.options import Bin, Debug, HfLike, Json, Trust
from isthmus.cli.terminal import progress_bar, show
from isthmus.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOptions:
    first: Annotated[Path, typer.Argument(metavar="A", help="Hugging Face folder or Megatron checkpoint.")]
    second: Annotated[Path, typer.Argument(metavar="B", help="The model to compare it with.")]
    hf_like: HfLike = None
    bin: Bin = False
    logits: Annotated[
        bool, typer.Option("--logits", help="Also run both in float32 on the same tokens and compare their logits.")
    ] = False
    tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="X", help="Largest difference of logits that counts as equal; default 1e-4."),
    ] = None
    tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Length of a sample of --logits; default 64.")
    ] = None
    layer_by_layer: Annotated[
        bool,
        typer.Option("--layer-by-layer", help="Keep the weights of one layer in memory at a time, even if all fit."),
    ] = False
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let --logits run modelling code of a model folder.")
    ] = False
    trust: Trust = False
    debug: Debug = False
    json: Json = False


def verify(options: VerifyOptions) -> int:
    """Compare two models bit by bit, in any formats; exit code 1 if they differ."""
    if not options.logits and (
        options.tolerance is not None
        or options.tokens is not None
        or options.layer_by_layer
        or options.trust_remote_code
    ):
        raise UsageError("--tolerance, --tokens, --layer-by-layer and --trust-remote-code need --logits. Add it.")
    from isthmus.convert.verify.compare import compare_models
    from isthmus.convert.verify.compare_logits import TOLERANCE, LogitsCheck

    check = LogitsCheck(
        tolerance=TOLERANCE if options.tolerance is None else options.tolerance,
        tokens=options.tokens,
        by_layer=options.layer_by_layer,
        trust_remote_code=options.trust_remote_code,
    )
    with progress_bar("comparing") as progress:
        comparison = compare_models(
            options.first,
            options.second,
            hf_like=options.hf_like,
            bin=options.bin,
            logits=check if options.logits else None,
            progress=progress,
        )
    show(comparison, as_json=options.json)
    return 0
