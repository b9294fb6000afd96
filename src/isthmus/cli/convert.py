"""``isthmus convert``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli import options
from isthmus.cli.terminal import interruptible, progress_bar, show
from isthmus.errors import UsageError

if TYPE_CHECKING:
    from isthmus.families.family import Family

FORMATS = ("hf", "torch_dist", "torch")
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Hugging Face folder or Megatron checkpoint.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to create; it must not exist.")],
    to: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="hf, torch_dist, or torch (legacy mp_rank_*).")
    ] = None,
    tp: options.Tp = None,
    pp: options.Pp = None,
    vpp: options.Vpp = None,
    ep: options.Ep = None,
    etp: options.Etp = None,
    spelling: options.Spelling = None,
    dtype: options.Dtype = None,
    hf_like: options.HfLike = None,
    bin: options.Bin = False,
    vocab_size: options.VocabSize = None,
    hf_family: options.HfFamily = None,
    adapter: options.Adapter = None,
    learn: options.Learn = False,
    keep: options.Keep = None,
    push: options.Push = None,
    public: options.Public = False,
    trust: options.Trust = False,
    debug: options.Debug = False,
    json: options.Json = False,
) -> int:
    """Convert between Hugging Face and Megatron-Core without building the model; any layout can load a torch_dist.

    The options of Megatron-LM's tools/checkpoint/convert.py (--loader, --saver, ...) are accepted instead.
    """
    _check_names(to, spelling, dtype)
    target: Any = _push_target(to, push, public=public)
    if keep is not None and not learn:
        raise UsageError("--keep is for the result of --learn. Add --learn, or leave it out.")
    family = _learn(source, keep, quiet=json) if learn else None
    import torch

    from isthmus.convert.legacy.legacy_layout import LegacyLayout
    from isthmus.convert.transfer import convert as run

    sizes = {"tp": tp, "pp": pp, "vpp": vpp, "ep": ep, "etp": etp}
    given = {name: size for name, size in sizes.items() if size is not None}
    names: Any = spelling
    with interruptible(), progress_bar("converting") as progress:
        done = run(
            source, destination, target, dtype=None if dtype is None else getattr(torch, DTYPES[dtype]),
            hf_like=hf_like, hf_family=hf_family, layout=LegacyLayout(**given) if given else None,
            spelling=names, bin=bin, vocab_size=vocab_size, family=family, adapter=adapter, progress=progress,
        )  # fmt: skip
    show(done, as_json=json)
    if family is not None and keep is not None:
        from isthmus.convert.learn import save_family

        print(f"kept as {save_family(family, keep)}", file=sys.stderr)
    if push is not None:
        from isthmus.hf.hub import push as upload

        address = upload({".": destination}, push, private=not public, report=lambda line: print(line, file=sys.stderr))
        print(f"pushed to {address}", file=sys.stderr)
    return 0


def merge(
    base: Annotated[str, typer.Argument(metavar="BASE", help="Hugging Face folder, or id on the Hub.")],
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="Folder of a LoRA adapter of PEFT.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create; it must not exist.")],
    dtype: options.Dtype = None,
    bin: options.Bin = False,
    push: options.Push = None,
    public: options.Public = False,
    trust: options.Trust = False,
    debug: options.Debug = False,
    json: options.Json = False,
) -> int:
    """Merge a LoRA adapter of PEFT into its base model, in float32 arithmetic and without building the model."""
    from isthmus.recipes.model.model_source import local_folder

    folder = local_folder(base, weights=True)
    return convert(folder, out, "hf", adapter=adapter, dtype=dtype, bin=bin, push=push, public=public, json=json)


def _check_names(to: str | None, spelling: str | None, dtype: str | None) -> None:
    if to is not None and to not in FORMATS:
        raise UsageError(f"--to {to} is not a supported format. Use {', '.join(FORMATS)}.")
    if spelling not in (None, "te", "local"):
        raise UsageError(f"--spelling {spelling} is not known. Use te (TransformerEngine's layers) or local.")
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype} is not known. Use {', '.join(DTYPES)}.")


def _push_target(to: str | None, push: str | None, *, public: bool) -> str | None:
    """``--push`` requires a Hugging Face folder."""
    if push is None:
        if public:
            raise UsageError("--public is for the repository that --push creates. Add --push REPO_ID, or leave it out.")
        return to
    from isthmus.hf.hub import check_name

    check_name(push)
    if to not in (None, "hf"):
        raise UsageError(f"--push uploads a Hugging Face folder, and this writes {to}. Leave one of them out.")
    return "hf"


def _learn(source: Path, keep: Path | None, *, quiet: bool) -> Family:
    """Infer the family before anything is written."""
    from rich.console import Console

    from isthmus.convert.learn import family_path, learn
    from isthmus.families.discover.family_file import write_family

    console = Console(file=sys.stderr, highlight=False, markup=False, soft_wrap=True)
    with console.status("learning"):
        family = learn(source, console.print)
    if keep is not None:
        family_path(family.name, keep)
    if not quiet:
        print(write_family(family), end="", flush=True)
    return family
