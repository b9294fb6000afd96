"""From one format to another, tensor by tensor; the destination appears whole or not at all."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from isthmus.convert.canonical import Destination, own_placements
from isthmus.convert.hf.to_hf import HfFiles
from isthmus.convert.legacy.legacy_layout import Grid
from isthmus.convert.legacy.megatron_args import flags_to_give, megatron_args, without_switch
from isthmus.convert.legacy.to_legacy import LegacyFiles, LiveSpelling, padded_vocab_size
from isthmus.convert.open_model import HF_PART, Format, Stored, open_stored
from isthmus.convert.stream import Progress, stream
from isthmus.convert.torch_dist.to_torch_dist import TorchDistFiles, common_content
from isthmus.convert.verify.checksums import Digests, write_manifest
from isthmus.convert.weight_source import Meta
from isthmus.engine.checkpoint.checkpoint_names import TRACKER
from isthmus.errors import UsageError, disk_errors
from isthmus.families.discover.json_family import FILE, write_family
from isthmus.families.family import Family
from isthmus.families.family_transfer import restate
from isthmus.families.registry import all_families
from isthmus.hf.model_folder import write_model_files
from isthmus.hf.staged_folder import StagedFolder

FLAG = "trust_remote_code=True"


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion did, for people and for ``--json``."""

    source: str
    source_format: str
    destination: str
    destination_format: str
    family: str
    num_tensors: int
    num_bytes: int
    time_s: float
    megatron_flags: list[str]
    """What Megatron-LM has to be told on its command line, since it does not take it from a checkpoint."""
    megatron_lacks: list[str]
    """What the model computes and Megatron-LM has no switch for; Isthmus has."""
    notes: list[str]
    """What was decided about the source's tensors on the way in, and what users of the destination have to know."""

    def as_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


@torch.no_grad()
def convert(
    source: Path | str,
    destination: Path | str,
    to: Format | None = None,
    *,
    dtype: torch.dtype | None = None,
    hf_like: Path | None = None,
    hf_family: str | None = None,
    grid: Grid | None = None,
    spelling: LiveSpelling | None = None,
    bin: bool = False,
    vocab_size: int | None = None,
    family: Family | None = None,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Convert a model on the disk into another format.

    Args:
        source: a Hugging Face folder or a Megatron checkpoint.
        destination: must not exist.
        to: ``hf``, ``torch_dist`` or ``torch`` (legacy); None is ``torch_dist`` for a Hugging Face folder, else ``hf``.
        dtype: of the tensors; None keeps what each of them has.
        hf_like: see :func:`~isthmus.convert.open_model.open_stored`.
        hf_family: of the Hugging Face folder to write; None is that of the source. ``isthmus`` can say any model
            that is built here except latent attention, and brings its modelling files along.
        grid: ranks of a legacy checkpoint; the other formats have none.
        spelling: names in a legacy checkpoint; None is ``te``, what Megatron-LM takes by default.
        bin: see :func:`~isthmus.convert.open_model.open_stored`.
        vocab_size: see :func:`~isthmus.convert.open_model.open_stored`.
        family: see :func:`~isthmus.convert.open_model.open_stored`; it lies beside a checkpoint afterwards.
        progress: called with bytes done and bytes in all.

    Raises:
        MissingInput, DataError, UnsafeInput, UsageError: the source is absent, damaged, or not what its config says;
            nothing was written.
        NoSpace, IOFailure: the destination exists or cannot be written; nothing of it is left.
    """
    start_s = time.monotonic()
    stored = open_stored(Path(source), hf_like, bin=bin, vocab_size=vocab_size, family=family)
    target: Format = to or ("torch_dist" if stored.format == "hf" else "hf")
    if target != "torch" and (grid is not None or spelling is not None):
        raise UsageError(
            f"{target} has neither layout nor spelling: it is read under any. "
            "Leave --tp, --pp, --vpp, --ep, --etp and --spelling out, or --to torch."
        )
    if hf_family is not None:
        if target != "hf":
            raise UsageError(
                f"--hf-family is for Hugging Face folders, and this writes {target}. Leave it out, or --to hf."
            )
        stored = _restated(stored, hf_family)
    grid = grid or Grid()
    grid.check(stored.arch)
    placements = own_placements(stored.family, stored.arch)
    dtypes = {
        name: dtype if dtype is not None and placed.rule.dtype is None else stored.weights.dtype(name)
        for name, placed in placements.items()
    }
    lacks = without_switch(stored.arch) if target != "hf" else []
    told = f"Megatron-LM 0.16.1 has no switch for {', '.join(lacks)}: this checkpoint trains in Isthmus only."
    isthmus_only = [told] if lacks else []
    digests = Digests()
    with StagedFolder(destination) as staged:
        files = _lay_out(stored, staged.path, target, dtypes, grid, spelling or "te")

        def move(name: str, rows: slice) -> int:
            chunk = stored.weights.read(name, rows).to(dtypes[name])
            digests.update(name, chunk)
            return files.put(name, rows, chunk)

        metas = {
            name: Meta(dtypes[name], placed.rule.canonical_shape(stored.arch)) for name, placed in placements.items()
        }
        try:
            stream(metas, move, files.total_bytes, progress)
        except BaseException:
            files.close(sync=False)
            raise
        files.close()
        with disk_errors(staged.path):
            _write_beside(stored, staged.path, target, dtypes, digests)
    return Converted(
        source=str(source),
        source_format=stored.format,
        destination=str(destination),
        destination_format=target,
        family=stored.family.name,
        num_tensors=len(stored.family.hf_shapes(stored.arch)) if target == "hf" else len(placements),
        num_bytes=files.total_bytes,
        time_s=time.monotonic() - start_s,
        megatron_flags=[]
        if lacks or target == "hf"
        else _megatron_flags(stored, Path(destination), target, grid, spelling),
        megatron_lacks=lacks,
        notes=[*stored.said, *isthmus_only, *(notes_on(stored.family) if target == "hf" else [])],
    )


def notes_on(family: Family) -> list[str]:
    """What whoever loads an exported folder of the family has to know."""
    if not family.auto_map:
        return []
    return [
        f"transformers has no class for this model: its modelling files lie in the folder, and {FLAG} runs them.",
        f"Load it with AutoModelForCausalLM.from_pretrained(DST, {FLAG}). "
        "Without that transformers refuses the folder; so do programs that never run a model's own code, as llama.cpp.",
    ]


def _restated(stored: Stored, hf_family: str) -> Stored:
    """The same model, to be written as one of another family."""
    if hf_family not in all_families():
        raise UsageError(f"--hf-family {hf_family} is not known. Known are {', '.join(all_families())}.")
    family = all_families()[hf_family]
    return replace(stored, family=family, arch=restate(stored.arch, stored.family, family))


def _megatron_flags(
    stored: Stored, destination: Path, target: Format, grid: Grid, spelling: LiveSpelling | None
) -> list[str]:
    """What Megatron-LM has to be told to load the checkpoint and to build its model."""
    flags = [f"--load {shlex.quote(str(destination))}", "--use-checkpoint-args", *flags_to_give(stored.arch)]
    if target == "torch":
        flags += grid.flags()
        flags += ["--transformer-impl local"] if spelling == "local" else []
    if stored.like is not None and any(path.name.startswith("tokenizer") for path in stored.like.small_files()):
        tokenizer = shlex.quote(str(destination / HF_PART))
        flags += ["--tokenizer-type HuggingFaceTokenizer", f"--tokenizer-model {tokenizer}"]
    return flags


def _lay_out(
    stored: Stored,
    folder: Path,
    target: Format,
    dtypes: Mapping[str, torch.dtype],
    grid: Grid,
    spelling: LiveSpelling,
) -> Destination:
    """The empty files of the destination."""
    family, arch = stored.family, stored.arch
    if target == "hf":
        return HfFiles(folder, family, arch, dtypes)
    inner = folder / "release"
    with disk_errors(inner):
        inner.mkdir()
    main = _main_dtype(dtypes)
    if target == "torch_dist":
        return TorchDistFiles(inner, family, arch, dtypes, common_content(megatron_args(arch, main)))
    args = megatron_args(arch, main, grid=grid, padded_vocab_size=padded_vocab_size(arch, grid), spelling=spelling)
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 0}
    return LegacyFiles(inner, family, arch, dtypes, common, grid, spelling)


def _write_beside(
    stored: Stored, folder: Path, target: Format, dtypes: Mapping[str, torch.dtype], digests: Digests
) -> None:
    """Config and tokenizer (beside a checkpoint, for the way back), the tracker of Megatron-LM, checksums."""
    inner = folder if target == "hf" else folder / HF_PART
    inner.mkdir(exist_ok=True)
    dtype = str(_main_dtype(dtypes)).removeprefix("torch.")
    base = None if stored.like is None else stored.like.config
    config = stored.family.to_hf_config(stored.arch, base, dtype=dtype)
    write_model_files(inner, stored.like, config)
    small = [path for path in inner.iterdir() if path.suffix != ".safetensors"]
    if target != "hf":
        (folder / TRACKER).write_text("release", encoding="utf-8")
        if stored.family.data is not None:
            (folder / FILE).write_text(write_family(stored.family), encoding="utf-8")
            small.append(folder / FILE)
    write_manifest(folder, digests.found(), small)


def _main_dtype(dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
    """The type of most tensors."""
    kinds = list(dtypes.values())
    return max(dict.fromkeys(kinds), key=kinds.count)
