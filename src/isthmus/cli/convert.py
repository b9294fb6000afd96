"""``isthmus convert``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli.options import (
    Adapter,
    Bin,
    Debug,
    Dtype,
    Ep,
    Etp,
    HfFamily,
    HfLike,
    Json,
    Keep,
    Learn,
    Pp,
    Public,
    Push,
    Spelling,
    Tp,
    Trust,
    VocabSize,
    Vpp,
)
from isthmus.cli.terminal import interruptible, note, progress_bar, say, show
from isthmus.errors import UsageError, escaped

if TYPE_CHECKING:
    from isthmus.families.family import Family

SERVING_PAGE = "docs/how-to/serve-the-result.md"
FORMATS = ("hf", "torch_dist", "torch")
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertOptions:
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="Hugging Face folder, run folder or Megatron checkpoint; URL of a checkpoint of a run."
        ),
    ]
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to create; it must not exist.")]
    to: Annotated[str | None, typer.Option(metavar="FORMAT", help="hf, torch_dist, or torch (legacy mp_rank_*).")] = (
        None
    )
    tp: Tp = None
    pp: Pp = None
    vpp: Vpp = None
    ep: Ep = None
    etp: Etp = None
    spelling: Spelling = None
    dtype: Dtype = None
    hf_like: HfLike = None
    bin: Bin = False
    vocab_size: VocabSize = None
    hf_family: HfFamily = None
    adapter: Adapter = None
    learn: Learn = False
    keep: Keep = None
    push: Push = None
    public: Public = False
    trust: Trust = False
    debug: Debug = False
    json: Json = False


def convert(options: ConvertOptions) -> int:
    """Convert between Hugging Face and Megatron-Core without building the model; any layout can load a torch_dist.

    The options of Megatron-LM's tools/checkpoint/convert.py (--loader, --saver, ...) are accepted instead.
    """
    _check_names(options.to, options.spelling, options.dtype)
    target: Any = _push_target(options.to, options.push, public=options.public)
    if options.keep is not None and not options.learn:
        raise UsageError("--keep is for the result of --learn. Add --learn, or leave it out.")
    from isthmus.files.remote_files import is_store_url
    from isthmus.recipes.run_dir import exported_adapter, exported_model

    source: Path | str = options.source
    if options.learn or not is_store_url(source):
        source = exported_model(Path(source))
    family = _learn(Path(source), options.keep, quiet=options.json) if options.learn else None
    import torch

    from isthmus.convert.legacy.legacy_layout import LegacyLayout
    from isthmus.convert.transfer import convert as run

    sizes = {"tp": options.tp, "pp": options.pp, "vpp": options.vpp, "ep": options.ep, "etp": options.etp}
    layout = {name: size for name, size in sizes.items() if size is not None}
    spelling: Any = options.spelling
    with interruptible(), progress_bar("converting") as progress:
        result = run(
            source,
            options.destination,
            target,
            dtype=None if options.dtype is None else getattr(torch, DTYPES[options.dtype]),
            hf_like=options.hf_like,
            hf_family=options.hf_family,
            layout=LegacyLayout(**layout) if layout else None,
            spelling=spelling,
            bin=options.bin,
            vocab_size=options.vocab_size,
            family=family,
            adapter=None if options.adapter is None else exported_adapter(options.adapter),
            progress=progress,
        )
    show(result, as_json=options.json)
    if family is not None and options.keep is not None:
        from isthmus.tools.learn.learn import save_family

        note(f"kept as {save_family(family, options.keep)}")
    if options.push is not None:
        from isthmus.hf.hub import push as upload

        address = upload({".": options.destination}, options.push, private=not options.public, report=note)
        note(f"pushed to {address}")
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeOptions:
    base: Annotated[str, typer.Argument(metavar="BASE", help="Hugging Face folder, run folder, or id on the Hub.")]
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="Folder of a LoRA adapter of PEFT, or run folder.")]
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create; it must not exist.")]
    dtype: Dtype = None
    bin: Bin = False
    push: Push = None
    public: Public = False
    trust: Trust = False
    debug: Debug = False
    json: Json = False


def merge(options: MergeOptions) -> int:
    """Merge a LoRA adapter of PEFT into its base model, in float32 arithmetic and without building the model."""
    from isthmus.recipes.model.model_source import local_folder
    from isthmus.recipes.run_dir import exported_model

    folder = exported_model(local_folder(options.base, weights=True))
    return convert(
        ConvertOptions(
            source=str(folder),
            destination=options.out,
            to="hf",
            adapter=options.adapter,
            dtype=options.dtype,
            bin=options.bin,
            push=options.push,
            public=options.public,
            json=options.json,
        )
    )


def _check_names(to: str | None, spelling: str | None, dtype: str | None) -> None:
    if to is not None and to.lower() == "gguf":
        raise UsageError(
            f"--to {to} is not a supported format. Convert to hf, then use the converter of llama.cpp: see "
            f"{SERVING_PAGE}."
        )
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

    from isthmus.families.inferred.family_file import write_family
    from isthmus.tools.learn.learn import family_path, learn

    console = Console(file=sys.stderr, highlight=False, markup=False, soft_wrap=True)
    with console.status("learning"):
        family = learn(source, lambda line: console.print(escaped(line)))
    if keep is not None:
        family_path(family.name, keep)
    if not quiet:
        say(write_family(family), end="", exact=True)
    return family
