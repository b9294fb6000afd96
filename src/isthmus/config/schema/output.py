"""Checkpoints, exports and logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field, create_model, model_validator

from isthmus.config.schema.resume_rules import names_accepted
from isthmus.config.schema.section import Count, Interval, PathText, Section, listed, refuse

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


_ASYNC = """Write checkpoints in the background: training waits only until the state is copied to host memory, which
    needs as much memory again as the state of this rank in a checkpoint."""

if TYPE_CHECKING:
    _WithAsync = Section
else:  # the name of this setting is a keyword of Python
    _WithAsync = create_model(
        "_WithAsync", __base__=Section, __doc__="async", **{"async": (bool, Field(False, description=_ASYNC))}
    )


class CheckpointConfig(_WithAsync):
    """Checkpoints and exports."""

    every: Interval = None
    """Steps between checkpoints; null or 0: only at the end."""
    memory_every: Interval = None
    """Steps between copies of the state in host memory, on this machine and a peer machine, from which a run resumes
    after the loss of processes or of a machine; null or 0: none."""
    memory_dir: PathText = "/dev/shm"
    """Folder of a tmpfs on each machine, for the copies of memory_every."""
    grace_s: Annotated[float, Field(gt=0)] = 25.0
    """Seconds between a stop signal and the end of the run. A step or evaluation that does not fit is abandoned, and
    the state after the step before is saved."""
    store: Annotated[str, Field(pattern=r"^[a-z0-9+.-]+://.+")] | None = None
    """URL of a folder in an object store, such as s3://bucket/run, where checkpoints are written in place of out; needs
    the package of fsspec for it, such as s3fs."""
    keep: Count = 2
    """Number of checkpoints to keep; older ones are deleted."""
    keep_best: bool = False
    """Also keep the checkpoint with the lowest validation loss, saved when it is measured, and export it at the end
    instead of the last state; needs train.eval_every."""
    resume: PathText = "auto"
    """auto: resume from the newest checkpoint of this run, if any; never: start anew; or a checkpoint, as a path or URL
    of a store."""
    accept_changes: Annotated[
        tuple[str, ...],
        BeforeValidator(
            lambda value: [name.strip() for name in value.split(",")] if isinstance(value, str) else value,
            json_schema_input_type=str | tuple[str, ...],
        ),
        Field(strict=False),
    ] = ()
    """Settings with which a run is resumed although they differ from those of its checkpoint and affect the result,
    such as lr, min_lr; see the page on checkpoints."""
    skip_checksums: bool = False
    """Do not check the checksums of what is read: model, checkpoint, prepared data."""
    hf_every: Interval = None
    """Steps between Hugging Face exports; null or 0: only at the end."""
    save_final: bool = True
    """Save a checkpoint after the last step."""
    export_final: bool = True
    """Export the model in Hugging Face format after the last step."""
    export_merged: bool = True
    """lora: export the model with its adapters merged, too; the adapters are always exported, to adapter."""
    push: Annotated[str, Field(min_length=1)] | None = None
    """Repository on the Hub, NAMESPACE/NAME, to which the exported model is uploaded at the end."""
    push_public: bool = False
    """Make a repository that push creates public; else it is private."""

    @model_validator(mode="after")
    def _changes_can_be_accepted(self) -> CheckpointConfig:
        try:
            names_accepted(self.accept_changes)
        except ValueError as error:
            refuse("accept_changes", str(error))
        return self

    @property
    def asynchronous(self) -> bool:
        """The setting ``async``."""
        return bool(getattr(self, "async"))

    @model_validator(mode="after")
    def _something_to_push(self) -> CheckpointConfig:
        if self.push is not None and not self.export_final:
            refuse("push", "push uploads the final export, and export_final=false; set it, or leave push out")
        if self.push_public and self.push is None:
            refuse("push_public", "push_public is for the repository that push creates; set checkpoint.push")
        return self


class LoggingConfig(Section):
    """Logs."""

    to: Annotated[
        tuple[TrackerName, ...],
        BeforeValidator(listed, json_schema_input_type=TrackerName | tuple[TrackerName, ...]),
        Field(strict=False),
    ] = ("tensorboard",)
    """Experiment trackers, besides metrics.jsonl. tensorboard writes into the run folder, if it is installed; the
    others are set up with their own environment variables."""
    project: Annotated[str, Field(min_length=1)] = "isthmus"
    """W&B and Trackio: project; MLflow: experiment."""
    name: Annotated[str, Field(min_length=1)] | None = None
    """Name of the run in trackers; null: the name of its folder."""
    every: Count = 1
    """Steps between log lines and points of trackers; metrics.jsonl has every step."""
    style: Literal["isthmus", "megatron"] = "isthmus"
    """Format of log lines: that of Isthmus, or of Megatron-LM for tools that parse its logs."""
    progress: Literal["auto", "bar", "lines"] = "auto"
    """auto: on a terminal, outside of CI, also a live bar with loss, remaining time, speed and memory below the lines;
    bar: the bar also where no terminal is detected; lines: no bar."""
    spike_factor: Annotated[float, Field(gt=0)] | None = 10.0
    """A loss or gradient norm above the median of the last 100 steps by this many times their spread (1.48 times the
    median absolute deviation, at least 5% of the median) is a spike: an event names the samples with the largest part
    of the loss, which takes a forward pass. null: spikes are not looked for."""
    ranks_every: Interval = 50
    """Steps between reports of the ranks: the slowest one, and temperature, power, clock and throttling of the GPUs, if
    nvidia-ml-py or amdsmi is installed; null or 0: none."""
    straggler_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """A rank is reported as slow if the others wait for at least this share of its own time in a step."""
