"""Checkpoints, exports and logs."""

from __future__ import annotations

from typing import Literal

from isthmus.config.schema.section import Count, Interval, PathText, Section


class CheckpointConfig(Section):
    """Checkpoints and exports."""

    every: Interval = None
    """Steps between checkpoints; null or 0: only at the end."""
    keep: Count = 2
    """Number of checkpoints to keep; older ones are deleted."""
    resume: PathText = "auto"
    """auto: resume from the newest checkpoint in out, if any; never: start anew; or a checkpoint folder."""
    hf_every: Interval = None
    """Steps between Hugging Face exports; null or 0: only at the end."""
    save_final: bool = True
    """Save a checkpoint after the last step."""
    export_final: bool = True
    """Export the model in Hugging Face format after the last step."""


class LoggingConfig(Section):
    """Logs."""

    tensorboard: bool = True
    """Write TensorBoard files into the run folder, if tensorboard is installed."""
    every: Count = 1
    """Steps between log lines and TensorBoard points; metrics.jsonl has every step."""
    style: Literal["isthmus", "megatron"] = "isthmus"
    """Format of log lines: that of Isthmus, or of Megatron-LM for tools that parse its logs."""
