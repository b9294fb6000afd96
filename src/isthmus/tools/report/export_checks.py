"""What a run has exported, and whether it is complete and equal to its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from isthmus.convert.canonical import unique_placements
from isthmus.convert.open_model import OpenedModel, open_model
from isthmus.convert.verify.compare import compare_models
from isthmus.engine.checkpoint.checkpoint_folder import checkpoint_dir
from isthmus.errors import IsthmusError
from isthmus.files.checked_files import ChecksumVerifier
from isthmus.tools.report.run_history import RunHistory


@dataclass(frozen=True, slots=True)
class ExportCheck:
    what: str
    state: Literal["ok", "error", "unknown"]
    text: str


def export_checks(run: RunHistory, *, verify: bool) -> list[ExportCheck]:
    """Checks of the final exports; ``verify`` reads all of their files, and compares a model with its checkpoint."""
    checks = []
    for folder in (run.folder.export(), run.folder.adapter()):
        if folder.is_dir():
            checks.append(_checked(f"{folder.name}/: files", partial(_files, folder, verify)))
    if not checks:
        why = "The run has not ended, or checkpoint.export_final is false."
        return [ExportCheck("export", "unknown", f"There is none. {why}")]
    if (run.folder.export() / "config.json").is_file():
        checks.append(_checked(f"{run.folder.export().name}/: weights", partial(_weights, run, verify)))
    return checks


def _checked(what: str, check: Callable[[], tuple[Literal["ok", "unknown"], str]]) -> ExportCheck:
    try:
        return ExportCheck(what, *check())
    except (IsthmusError, OSError) as problem:
        return ExportCheck(what, "error", str(problem))


def _files(folder: Path, verify: bool) -> tuple[Literal["ok", "unknown"], str]:
    files = [path for path in folder.iterdir() if path.is_file()]
    size = f"{len(files)} files, {sum(path.stat().st_size for path in files) / 2**20:,.1f} MiB"
    verifier = ChecksumVerifier()
    if not verifier.has_list(folder):
        return "unknown", f"{size}; without checksums.json they cannot be checked."
    if verify:
        verifier.check_folder(folder)
        return "ok", f"{size}; their content has the checksums of checksums.json."
    verifier.check_complete(folder)
    return "ok", f"{size}; complete, with the sizes of checksums.json."


def _weights(run: RunHistory, verify: bool) -> tuple[Literal["ok", "unknown"], str]:
    if run.config.lora.enabled:
        return "unknown", "Merged from the base model and the adapter: there is no checkpoint with the same tensors."
    step = next(_exported_steps(run), None)
    if step is None:
        return "unknown", "The step of the export is not recorded in events.jsonl."
    checkpoint = checkpoint_dir(run.folder.checkpoints, step)
    if not checkpoint.is_dir():
        return "unknown", f"There is no checkpoint of step {step} any more to compare with."
    if not verify:
        return "unknown", f"Not compared with {checkpoint.name}; isthmus report --verify does."
    dtypes = [_dtypes(open_model(folder)) for folder in (checkpoint, run.folder.export())]
    if dtypes[0] != dtypes[1]:
        how = f"Exported as {dtypes[1]} from a checkpoint in {dtypes[0]}, so the bits differ"
        return "unknown", f"{how}; isthmus verify --logits compares their outputs."
    compared = compare_models(checkpoint, run.folder.export())
    size = f"{compared.num_tensors} tensors, {compared.num_bytes / 2**20:,.1f} MiB"
    return "ok", f"Equal to {checkpoint.name} bit by bit: {size}."


def _dtypes(model: OpenedModel) -> str:
    dtypes = {model.weights.dtype(name) for name in unique_placements(model.family, model.arch)}
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _exported_steps(run: RunHistory) -> Iterator[int]:
    """The steps of final exports, the newest first."""
    for row in reversed(run.events):
        if row.get("event") == "export" and Path(str(row.get("path"))).name == run.folder.export().name:
            yield row["step"]
