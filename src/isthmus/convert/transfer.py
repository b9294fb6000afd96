"""Converts a model on disk into another format: open, plan, stream the tensors, publish the folder."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from isthmus.convert.canonical import Destination, Progress, stream, unique_placements
from isthmus.convert.hf.hf_tensors import HfWriter
from isthmus.convert.legacy.legacy_layout import LegacyLayout
from isthmus.convert.legacy.megatron_args import megatron_args, required_flags, unsupported_features
from isthmus.convert.legacy.to_legacy import LegacyWriter, LiveSpelling, padded_vocab_size
from isthmus.convert.open_model import HF_SUBFOLDER, Format, OpenedModel, open_model
from isthmus.convert.torch_dist.to_torch_dist import TorchDistWriter
from isthmus.convert.towers import FOLDER as TOWERS
from isthmus.convert.weight_source import TensorSpec, copied_dtype
from isthmus.engine.checkpoint.tracker import TRACKER
from isthmus.errors import OutputExists, UsageError, disk_errors
from isthmus.families.architecture import Dropout
from isthmus.families.family import Family
from isthmus.families.family_transfer import transfer_architecture
from isthmus.families.inferred.family_file import FILE as FAMILY_FILE
from isthmus.families.inferred.family_file import write_family
from isthmus.families.registry import all_families
from isthmus.files.atomic_write import TEMPORARY
from isthmus.files.checked_files import RecordedFiles, recording
from isthmus.files.folder_lock import LOCK, FolderLock
from isthmus.files.remote_files import is_store_url
from isthmus.hf.companion_files import check_companions
from isthmus.hf.model_folder import write_model_files
from isthmus.hf.published_checksums import published_hashes
from isthmus.hf.special_tokens import tokens_beyond_vocabulary
from isthmus.hf.staged_folder import StagedFolder
from isthmus.hf.tensors.finite import check_cast

_REMOTE_CODE = "trust_remote_code=True"


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """Result of a conversion, also the output of ``--json``."""

    source: str
    source_format: str
    destination: str
    destination_format: str
    family: str
    num_tensors: int
    num_bytes: int
    time_s: float
    megatron_flags: list[str]
    """Flags that Megatron-LM does not read from a checkpoint and needs on its command line."""
    megatron_lacks: list[str]
    """Features of the model that Isthmus supports and Megatron-LM does not."""
    notes: list[str]
    """Notes on how the source was read and how to use the destination."""

    def as_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Plan:
    model: OpenedModel
    """The source model, with the family and architecture to write."""
    format: Format
    tensors: dict[str, TensorSpec]
    """Dtype and shape of each tensor by canonical name."""
    layout: LegacyLayout
    spelling: LiveSpelling
    unsupported: list[str]
    """Features of the model that Megatron-LM has no option for; empty for Hugging Face folders."""

    @property
    def main_dtype(self) -> torch.dtype:
        """The most common dtype."""
        dtypes = [spec.dtype for spec in self.tensors.values()]
        return max(dict.fromkeys(dtypes), key=dtypes.count)

    @property
    def num_tensors(self) -> int:
        """In the files, with those of the towers."""
        towers = 0 if self.model.towers is None else len(self.model.towers.tensors)
        return towers + len(self.model.family.hf_shapes(self.model.arch) if self.format == "hf" else self.tensors)

    @property
    def dropout(self) -> Dropout:
        """That of the Hugging Face config; without one, none."""
        folder = self.model.hf_folder
        return Dropout() if folder is None else self.model.family.read_dropout(folder.config)

    def create_files(self, folder: Path) -> Destination:
        family, arch = self.model.family, self.model.arch
        dtypes = {name: spec.dtype for name, spec in self.tensors.items()}
        if self.format == "hf":
            towers = None if self.model.towers is None else self.model.towers.tensors
            return HfWriter(folder, family, arch, dtypes, towers)
        inner = folder / "release"
        with disk_errors(inner):
            inner.mkdir()
        common: dict[str, Any] = {
            "checkpoint_version": 3.0,
            "iteration": 0,
        }  # as at the start of a training in Megatron-LM
        describe = partial(megatron_args, arch, self.main_dtype, dropout=self.dropout)
        if self.format == "torch_dist":
            content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
            common |= {"args": describe(), "content_metadata": content}
            return TorchDistWriter(inner, family, arch, dtypes, common)
        rows = padded_vocab_size(arch, self.layout)
        args = describe(layout=self.layout, padded_vocab_size=rows, spelling=self.spelling)
        return LegacyWriter(inner, family, arch, dtypes, common | {"args": args}, self.layout, self.spelling)


@torch.no_grad()
def convert(
    source: Path | str,
    destination: Path | str,
    to: Format | None = None,
    *,
    dtype: torch.dtype | None = None,
    hf_like: Path | None = None,
    hf_family: str | None = None,
    layout: LegacyLayout | None = None,
    spelling: LiveSpelling | None = None,
    bin: bool = False,
    vocab_size: int | None = None,
    family: Family | None = None,
    adapter: Path | None = None,
    progress: Progress = lambda done, total: None,
) -> ConversionResult:
    """Convert a model on disk into another format.

    Args:
        source: a Hugging Face folder, a Megatron checkpoint, or the URL of a checkpoint in a store, which is
            downloaded to a temporary folder beside the destination.
        destination: folder to create; it must not exist.
        to: ``hf``, ``torch_dist`` or ``torch`` (legacy); default ``torch_dist`` for a Hugging Face folder, else ``hf``.
        dtype: dtype of all tensors; default: unchanged.
        hf_like: Hugging Face folder or ``preset:NAME`` whose config describes a checkpoint that has no config.
        hf_family: family of the Hugging Face folder to write; default: that of the source. ``isthmus`` expresses any
            supported model except latent attention, and includes its modeling files.
        layout: parallel sizes of a legacy checkpoint.
        spelling: tensor names in a legacy checkpoint; default ``te``, as in Megatron-LM.
        bin: read ``pytorch_model*.bin`` of a Hugging Face folder instead of safetensors.
        vocab_size: embedding rows without padding, for a checkpoint without config.
        family: inferred family of a Hugging Face folder; a checkpoint includes it as ``family.json``.
        adapter: LoRA adapter of PEFT, which is merged into a Hugging Face folder in float32 arithmetic.
        progress: called with (bytes done, total bytes).

    Raises:
        MissingInput, DataError, UnsafeInput, UsageError: the source is missing, damaged, or does not match its config;
            nothing is written.
        OutputExists, OutputInUse, NoSpace, IOFailure: the destination exists or cannot be written; partial output is
            removed.
    """
    with _local(source, Path(destination), progress) as path:
        start_s = time.monotonic()
        opened = open_model(path, hf_like=hf_like, bin=bin, vocab_size=vocab_size, family=family, adapter=adapter)
        plan = _plan(opened, to, dtype=dtype, hf_family=hf_family, layout=layout, spelling=spelling)
        if opened.hf_folder is not None:
            check_companions(opened.hf_folder)
        with StagedFolder(destination) as staged:
            num_bytes = _transfer(plan, staged, progress)
            with disk_errors(staged.path):
                _write_small_files(plan, staged.path)
        model, is_hf = plan.model, plan.format == "hf"
        return ConversionResult(
            source=str(source),
            source_format=model.format,
            destination=str(destination),
            destination_format=plan.format,
            family=model.family.name,
            num_tensors=plan.num_tensors,
            num_bytes=num_bytes,
            time_s=time.monotonic() - start_s,
            megatron_flags=[] if plan.unsupported or is_hf else _megatron_flags(plan, Path(destination), spelling),
            megatron_lacks=plan.unsupported,
            notes=[*model.notes, *_destination_notes(plan)],
        )


@contextmanager
def _local(source: Path | str, destination: Path, progress: Progress) -> Iterator[Path]:
    """The path of ``source``; of a URL a folder beside ``destination``; a download that was killed is continued."""
    if not is_store_url(source):
        yield Path(source)
        return
    from isthmus.engine.checkpoint.checkpoint_store import find_checkpoint  # other conversions start without fsspec

    if destination.exists():
        raise OutputExists(f"{destination} exists already. Remove it or choose another folder.")
    store, step = find_checkpoint(str(source))
    folder = destination.absolute().with_name(f"{TEMPORARY}{destination.name}-source")
    with FolderLock(folder.with_name(f"{folder.name}{LOCK}"), folder):
        store.download(step, folder, progress)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _plan(
    model: OpenedModel,
    to: Format | None,
    *,
    dtype: torch.dtype | None,
    hf_family: str | None,
    layout: LegacyLayout | None,
    spelling: LiveSpelling | None,
) -> _Plan:
    """A UsageError if the options do not fit the format or the model."""
    target = to or ("torch_dist" if model.format == "hf" else "hf")
    if target != "torch" and (layout is not None or spelling is not None):
        raise UsageError(
            f"{target} has no layout and no spelling: any layout can read it. "
            "Omit --tp, --pp, --vpp, --ep, --etp and --spelling, or use --to torch."
        )
    if target == "torch" and model.arch.head.score_head:
        raise UsageError("--to torch is a format of Megatron-LM, which has no reward models. Use --to torch_dist.")
    if hf_family is not None and hf_family != model.family.name:
        if target != "hf":
            raise UsageError(
                f"--hf-family is for Hugging Face folders, and this writes {target}. Omit it, or use --to hf."
            )
        if model.arch.head.score_head:
            raise UsageError("--hf-family is for language models, and this is a reward model. Omit it.")
        if (family := all_families().get(hf_family)) is None:
            raise UsageError(f"--hf-family {hf_family} is not known. Known are {', '.join(all_families())}.")
        if family.nested is not None:
            raise UsageError(
                f"--hf-family {hf_family} is multimodal, and {model.path} has no tensors for its towers. Omit it."
            )
        arch = transfer_architecture(model.arch, model.family, family)
        notes = model.notes
        if model.towers is not None and model.family.nested is None:
            notes = (*notes, f"{len(model.towers.tensors)} tensors of MTP layers are left out: {hf_family} has none")
        model = replace(model, family=family, arch=arch, towers=None, notes=notes)
    elif target == "hf" and model.family.nested is not None and model.towers is None:
        raise UsageError(
            f"{model.path} has the language model of a multimodal model ({model.family.name}) and not its other "
            "tensors. Give the folder of the whole model: --hf-like DIR. To export the language model alone: "
            f"--hf-family {model.family.nested.model_type}"
        )
    layout = layout or LegacyLayout()
    layout.check(model.arch)
    tensors = {
        name: TensorSpec(
            copied_dtype(placed.rule, partial(model.weights.dtype, name), dtype),
            placed.rule.canonical_shape(model.arch),
        )
        for name, placed in unique_placements(model.family, model.arch).items()
    }
    unsupported = unsupported_features(model.arch) if target != "hf" else []
    return _Plan(model, target, tensors, layout, spelling or "te", unsupported)


def _transfer(plan: _Plan, staged: StagedFolder, progress: Progress) -> int:
    """Stream all tensors into the destination, with checksums; returns the bytes written."""
    weights, files = plan.model.weights, plan.create_files(staged.path)

    def move(name: str, rows: slice) -> int:
        values = weights.read(name, rows)
        chunk = values.to(plan.tensors[name].dtype)
        check_cast(name, chunk, values)
        return files.put(name, rows, chunk)

    towers, total = plan.model.towers, files.total_bytes
    with recording() as read:
        with files.writer:
            stream(plan.tensors, move, total, progress)
            if towers is not None and isinstance(files, HfWriter):
                towers.copy(files.writer)
        written = {files.writer.folder: files.writer.written}
        if towers is not None and not isinstance(files, HfWriter):
            with disk_errors(staged.path):
                (staged.path / HF_SUBFOLDER).mkdir()
            written[staged.path / HF_SUBFOLDER / TOWERS] = towers.store(staged.path / HF_SUBFOLDER)
    staged.about["read"] = _files_read(plan.model, read)
    for folder, blocks_written in written.items():
        inner, parts = folder.relative_to(staged.path), blocks_written.parts()
        staged.parts.append({(inner / name).as_posix(): blocks for name, blocks in parts.items()})
    return total + (0 if towers is None else towers.num_bytes)


def _files_read(model: OpenedModel, read: RecordedFiles) -> dict[str, Any]:
    """Size and hash of each file that was read, also the one it was published with."""
    folder = model.hf_folder
    published = {} if folder is None or not folder.path.is_dir() else published_hashes(folder.path)
    for path in [] if folder is None else [folder.path / "config.json", *folder.small_files()]:
        if path.is_file():
            read.add(path)
    return {
        str(path.relative_to(model.path) if path.is_relative_to(model.path) else path.name): {
            "bytes": checksums.size,
            "xxh3_64_of_blocks": checksums.digest,
            **({"published": published[path]} if path in published else {}),
        }
        for path, checksums in sorted(read.checksums().items())
    }


def _write_small_files(plan: _Plan, folder: Path) -> None:
    """Config and tokenizer (in a subfolder of a checkpoint), and tracker file."""
    model = plan.model
    inner = folder if plan.format == "hf" else folder / HF_SUBFOLDER
    inner.mkdir(exist_ok=True)
    base = None if model.hf_folder is None else model.hf_folder.config
    config = model.family.to_hf_config(model.arch, base, dtype=str(plan.main_dtype).removeprefix("torch."))
    if base is None:
        config |= tokens_beyond_vocabulary(config)
    write_model_files(inner, model.hf_folder, config)
    if plan.format != "hf":
        (folder / TRACKER).write_text("release", encoding="utf-8")
        if model.family.data is not None:
            (folder / FAMILY_FILE).write_text(write_family(model.family), encoding="utf-8")


def _destination_notes(plan: _Plan) -> list[str]:
    if plan.unsupported:
        return [
            f"Megatron-LM 0.16.1 has no option for {', '.join(plan.unsupported)}: "
            "this checkpoint trains in Isthmus only."
        ]
    source = plan.model.hf_folder
    has_files = plan.model.family.auto_map or (source is not None and "auto_map" in source.config)
    if plan.format != "hf" or not plan.model.family.has_code or not has_files:
        return []
    return [
        f"transformers has no class for this model: the folder has its modeling files, and {_REMOTE_CODE} runs them.",
        f"Load it with AutoModelForCausalLM.from_pretrained(DST, {_REMOTE_CODE}). Without it transformers refuses the "
        "folder; so do programs that never run a model's own code, such as llama.cpp.",
    ]


def _megatron_flags(plan: _Plan, destination: Path, spelling: LiveSpelling | None) -> list[str]:
    """The flags with which Megatron-LM loads the checkpoint."""
    flags = [f"--load {shlex.quote(str(destination))}", "--use-checkpoint-args", *required_flags(plan.model.arch)]
    if plan.format == "torch":
        flags += plan.layout.flags(plan.model.arch.num_layers)
        flags += ["--transformer-impl local"] if spelling == "local" else []
    source = plan.model.hf_folder
    if source is not None and any(path.name.startswith("tokenizer") for path in source.small_files()):
        tokenizer = shlex.quote(str(destination / HF_SUBFOLDER))
        flags += ["--tokenizer-type HuggingFaceTokenizer", f"--tokenizer-model {tokenizer}"]
    return flags
