"""The options of ``isthmus convert`` and ``isthmus verify``, and their progress bar."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

HfLike = Annotated[
    Path | None,
    typer.Option(
        metavar="HF_DIR", help="Model folder, or preset:NAME, whose config describes a checkpoint without a config."
    ),
]
Bin = Annotated[
    bool,
    typer.Option(
        "--bin",
        help="Read pytorch_model*.bin instead of safetensors. These files are pickles: none of their code is run, and "
        "a file with code is refused. Prefer safetensors if the model has them.",
    ),
]
Tp = Annotated[int | None, typer.Option(min=1, metavar="N", help="Tensor parallel size of --to torch.")]
Pp = Annotated[int | None, typer.Option(min=1, metavar="N", help="Pipeline parallel size of --to torch.")]
Vpp = Annotated[int | None, typer.Option(min=1, metavar="N", help="Layer chunks per pipeline stage of --to torch.")]
Ep = Annotated[int | None, typer.Option(min=1, metavar="N", help="Expert parallel size of --to torch.")]
Etp = Annotated[int | None, typer.Option(min=1, metavar="N", help="Expert tensor parallel size; default: tp.")]
Spelling = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES", help="Tensor names of --to torch: te (TransformerEngine's layers, default) or local."
    ),
]
Dtype = Annotated[
    str | None, typer.Option(metavar="DTYPE", help="fp32, bf16 or fp16; default: the dtype of each tensor.")
]
VocabSize = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Embedding rows without padding, for a checkpoint that lacks this number."),
]
HfFamily = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="model_type to write with --to hf; isthmus includes its modelling files."),
]
Learn = Annotated[
    bool,
    typer.Option(
        "--learn", help="Infer the weight mapping of an unsupported model type, and prove it on small random models."
    ),
]
Keep = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Save the result of --learn in DIR; ISTHMUS_FAMILIES=DIR makes it available."),
]
Push = Annotated[
    str | None, typer.Option(metavar="REPO_ID", help="Upload the Hugging Face folder to this repository at the end.")
]
Public = Annotated[bool, typer.Option("--public", help="Make a repository that --push creates public.")]


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar with bytes and rate on stderr if it is a terminal; yields its update function (done, total)."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def clean_up_on_signals() -> Iterator[None]:
    """End the block on SIGINT, SIGTERM and SIGHUP, and ignore further ones while it removes what it has written."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(*_: object) -> None:
        for number in numbers:  # batch systems and users often send a second one
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
