"""What a run exports: Hugging Face folders, adapters, model cards, and their upload."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from isthmus.config.schema import RunConfig
from isthmus.data.batching.batches import Batches
from isthmus.engine.parallel.process_groups import Position, on_rank_0, sum_over_ranks
from isthmus.engine.trace_region import trace_region
from isthmus.errors import Preempted, disk_errors
from isthmus.files.atomic_write import write_atomic
from isthmus.hf.hub import push
from isthmus.recipes.model.adapter_export import export_adapter
from isthmus.recipes.model.hf_export import export_hf
from isthmus.recipes.model.rank_model import RankModel
from isthmus.recipes.model_card import model_card
from isthmus.recipes.plan.validation import RunContext
from isthmus.train.grace_period import GracePeriod
from isthmus.train.reporter import Reporter


@dataclass(frozen=True, slots=True)
class Exports:
    """Methods are collectives."""

    context: RunContext
    position: Position
    model: RankModel
    data: Batches
    """Training data, for the model card."""
    reporter: Reporter
    grace: GracePeriod

    def export(self, step: int, *, final: bool = False) -> None:
        """Write the Hugging Face folder of the state after ``step``.

        Raises Preempted if it does not end within the first half of the grace period of a stop request.
        """
        context, which = self.context, None if final else step
        if context.plan.adapters is not None:
            path = context.run_dir.adapter(which)
            with trace_region("export"):
                export_adapter(self.model, context.config, path)
                self._write_card(path, step, adapter=True)
            self.reporter.exported(step, path)
            if not exports_model(context.config):
                return
        name = context.config.model.export_dtype
        dtype = None if name == "source" else getattr(torch, name)
        path = context.run_dir.export(which)
        with trace_region("export"):
            export_hf(self.model, path, context.tokenizer, dtype=dtype, replace=True, check=self._check_stop)
            self._write_card(path, step)
        self.reporter.exported(step, path)

    def _check_stop(self) -> None:
        if self.grace.half_over:
            raise Preempted("stopped in an export, as requested. The same command resumes from the last checkpoint.")

    def _write_card(self, folder: Path, step: int, *, adapter: bool = False) -> None:
        if self.position.rank == 0:
            context, data = self.context, self.data
            metrics = context.run_dir.root / "metrics.jsonl"
            card = model_card(context.config, context.plan, data, metrics, step, adapter=adapter)
            with disk_errors(folder):
                write_atomic(folder / "README.md", card)

    def push(self) -> str | None:
        """Upload the final export. Returns the address, on rank 0 only."""
        repo, config = self.context.config.checkpoint.push, self.context.config
        if repo is None:
            return None
        run_dir, private = self.context.run_dir, not config.checkpoint.push_public
        folders = {".": run_dir.export()} if exports_model(config) else {}
        if config.lora.enabled:
            folders["adapter" if folders else "."] = run_dir.adapter()
        address: list[str] = []
        on_rank_0(lambda: address.append(push(folders, repo, private=private, report=self.reporter.log)), "push")
        return next(iter(address), None)

    def is_missing(self, step: int) -> bool:
        """Whether an export is due after ``step`` and missing, because of a stop request."""
        config, run_dir = self.context.config, self.context.run_dir
        if not is_due(config.checkpoint.hf_every, step):
            return False
        due = [run_dir.adapter(step)] if config.lora.enabled else []
        due += [run_dir.export(step)] if exports_model(config) else []
        missing = self.position.rank == 0 and not all(folder.exists() for folder in due)
        return sum_over_ranks([float(missing)], self.grace.device) != [0.0]


def is_due(interval: int | None, done: int) -> bool:
    """Whether something that happens every ``every`` steps does after ``done`` steps."""
    return bool(interval) and done % (interval or 1) == 0


def exports_model(config: RunConfig) -> bool:
    """Whether an export has the whole model."""
    return config.checkpoint.export_merged or not config.lora.enabled
