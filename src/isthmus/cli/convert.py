"""``isthmus convert``, ``merge`` and ``verify``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cli.options import BIN, DTYPE, HF_LIKE, PUBLIC, PUSH, TRUST, ResultOptions, argument, flag, option
from isthmus.cli.terminal import interruptible, note, progress_bar, say, show
from isthmus.errors import UsageError, escaped

if TYPE_CHECKING:
    from isthmus.families.family import Family

SERVING_PAGE = "docs/how-to/serve-the-result.md"
FORMATS = ("hf", "torch_dist", "torch")
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertOptions(ResultOptions):
    source: str = argument(
        "SRC", "Hugging Face folder, run folder or Megatron checkpoint; URL of a checkpoint of a run."
    )
    destination: Path = argument("DST", "Folder to create; it must not exist.")
    to: str | None = option("FORMAT", "hf, torch_dist, or torch (legacy mp_rank_*).")
    tp: int | None = option("N", "Tensor parallel size of --to torch.", min=1)
    pp: int | None = option("N", "Pipeline parallel size of --to torch.", min=1)
    vpp: int | None = option("N", "Layer chunks per pipeline stage of --to torch.", min=1)
    ep: int | None = option("N", "Expert parallel size of --to torch.", min=1)
    etp: int | None = option("N", "Expert tensor parallel size; default: tp.", min=1)
    spelling: str | None = option(
        "NAMES", "Tensor names of --to torch: te (TransformerEngine's layers, default) or local."
    )
    dtype: str | None = DTYPE()
    hf_like: Path | None = HF_LIKE()
    bin: bool = BIN()
    vocab_size: int | None = option(
        "N", "Embedding rows without padding, for a checkpoint that lacks this number.", min=1
    )
    hf_family: str | None = option("NAME", "model_type to write with --to hf; isthmus includes its modeling files.")
    adapter: Path | None = option("DIR", "Merge this LoRA adapter of PEFT into the Hugging Face folder SRC.")
    learn: bool = flag("Infer the weight mapping of an unsupported model type, and prove it on small random models.")
    keep: Path | None = option(
        "DIR|FILE.py",
        "Save the result of --learn in DIR, for ISTHMUS_FAMILIES=DIR, or as a module of families/models.",
    )
    push: str | None = PUSH()
    public: bool = PUBLIC()
    trust: bool = TRUST()


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

    sizes = {name: getattr(options, name) for name in ("tp", "pp", "vpp", "ep", "etp")}
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
class MergeOptions(ResultOptions):
    base: str = argument("BASE", "Hugging Face folder, run folder, or id on the Hub.")
    adapter: Path = argument("ADAPTER", "Folder of a LoRA adapter of PEFT, or run folder.")
    out: Path = argument("OUT", "Folder to create; it must not exist.")
    dtype: str | None = DTYPE()
    bin: bool = BIN()
    push: str | None = PUSH()
    public: bool = PUBLIC()
    trust: bool = TRUST()


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


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOptions(ResultOptions):
    first: Path = argument("A", "Hugging Face folder or Megatron checkpoint.")
    second: Path = argument("B", "The model to compare it with.")
    hf_like: Path | None = HF_LIKE()
    bin: bool = BIN()
    logits: bool = flag("Also run both in float32 on the same tokens and compare their logits.")
    tolerance: float | None = option("X", "Largest difference of logits that counts as equal; default 1e-4.", min=0.0)
    tokens: int | None = option("N", "Length of a sample of --logits; default 64.", min=1)
    layer_by_layer: bool = flag("Keep the weights of one layer in memory at a time, even if all fit.")
    trust_remote_code: bool = flag("Let --logits run modelling code of a model folder.")
    trust: bool = TRUST()


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
