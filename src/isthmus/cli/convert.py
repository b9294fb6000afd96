"""``isthmus convert``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli.convert_options import Bin, HfLike, cleared_away, progress_bar
from isthmus.cli.run_recipe import Debug, Json, show
from isthmus.errors import UsageError

if TYPE_CHECKING:
    from isthmus.families.family import Family

FORMATS = ("hf", "torch_dist", "torch")
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Hugging Face folder or Megatron checkpoint.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to make; it must not exist.")],
    to: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="hf, torch_dist, or torch (legacy mp_rank_*).")
    ] = None,
    tp: Annotated[int | None, typer.Option(min=1, metavar="N", help="Tensor-parallel ranks of --to torch.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, metavar="N", help="Pipeline stages of --to torch.")] = None,
    vpp: Annotated[int | None, typer.Option(min=1, metavar="N", help="Chunks of layers a stage of --to torch.")] = None,
    ep: Annotated[int | None, typer.Option(min=1, metavar="N", help="Expert-parallel ranks of --to torch.")] = None,
    etp: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Ranks that share an expert; default: tp.")
    ] = None,
    spelling: Annotated[
        str | None, typer.Option(metavar="NAMES", help="te or local: whose layers --to torch is named after.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(metavar="DTYPE", help="fp32, bf16 or fp16; default: as it is.")] = None,
    hf_like: HfLike = None,
    bin: Bin = False,
    vocab_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Rows of the embedding that are no padding, where nothing says it."),
    ] = None,
    hf_family: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="model_type to write with --to hf; isthmus brings its own modelling files."),
    ] = None,
    learn: Annotated[
        bool,
        typer.Option("--learn", help="Find out how a model type without a family lies, and prove it on small copies."),
    ] = False,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep what --learn found; ISTHMUS_FAMILIES=DIR makes it known from then on."),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(metavar="REPO_ID", help="Upload the Hugging Face folder to this repository in the end."),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="A repository that --push makes is open to all.")] = False,
    debug: Debug = False,
    json: Json = False,
) -> int:
    """Convert a model between Hugging Face and Megatron-Core without building it; a torch_dist fits every layout."""
    if to is not None and to not in FORMATS:
        raise UsageError(f"--to {to} is not a format this version writes. Use {', '.join(FORMATS)}.")
    if spelling not in (None, "te", "local"):
        raise UsageError(f"--spelling {spelling} is not known. Use te (TransformerEngine's layers) or local.")
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype} is not known. Use {', '.join(DTYPES)}.")
    import torch

    from isthmus.convert.legacy.legacy_layout import Grid
    from isthmus.convert.transfer import convert as run

    chosen = None if dtype is None else getattr(torch, DTYPES[dtype])
    sizes = {"tp": tp, "pp": pp, "vpp": vpp, "ep": ep, "etp": etp}
    asked = {name: size for name, size in sizes.items() if size is not None}
    grid = Grid(**asked) if asked else None
    target: Any = to
    names: Any = spelling
    if push is not None:
        from isthmus.hf.hub_upload import check_name

        check_name(push)
        target = target or "hf"
        if target != "hf":
            raise UsageError(f"--push uploads a Hugging Face folder, and this writes {target}. Leave one of them out.")
    if public and push is None:
        raise UsageError("--public is for the repository that --push makes. Add --push REPO_ID, or leave it out.")
    if keep is not None and not learn:
        raise UsageError("--keep is for what --learn finds. Add --learn, or leave it out.")
    learned = _learned(source, keep, quiet=json) if learn else None
    with cleared_away(), progress_bar("converting") as progress:
        done = run(
            source, destination, target, dtype=chosen, hf_like=hf_like, hf_family=hf_family, grid=grid,
            spelling=names, bin=bin, vocab_size=vocab_size, family=learned, progress=progress,
        )  # fmt: skip
    show(done, as_json=json)
    if learned is not None and keep is not None:
        from isthmus.convert.learn import keep as write

        print(f"kept as {write(learned, keep)}", file=sys.stderr)
    if push is not None:
        from isthmus.hf.hub_upload import push as upload

        address = upload(destination, push, private=not public, say=lambda told: print(told, file=sys.stderr))
        print(f"pushed to {address}", file=sys.stderr)
    return 0


def _learned(source: Path, keep: Path | None, *, quiet: bool) -> Family:
    """The family of a model that has none, found and proven before anything is written; shown unless ``quiet``."""
    from rich.console import Console

    from isthmus.convert.learn import kept_path, learn
    from isthmus.families.discover.json_family import write_family

    console = Console(file=sys.stderr, highlight=False, markup=False, soft_wrap=True)
    with console.status("learning"):
        family = learn(source, console.print)
    if keep is not None:
        kept_path(family.name, keep)
    if not quiet:
        print(write_family(family), end="", flush=True)
    return family
