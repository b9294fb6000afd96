"""What a run leaves behind."""

from __future__ import annotations

from typing import Literal

from isthmus.config.schema.section import Count, Interval, PathText, Section


class CheckpointConfig(Section):
    """What is saved when, and where a run goes on."""

    every: Interval = None
    """Steps between checkpoints; null or 0: none on the way."""
    keep: Count = 2
    """Newest checkpoints that are kept."""
    resume: PathText = "auto"
    """auto: from the newest checkpoint in out, if there is one; never: from the start; or a checkpoint folder."""
    hf_every: Interval = None
    """Steps between Hugging Face exports; null or 0: only at the end."""
    save_final: bool = True
    """Save a checkpoint after the last step."""
    export_final: bool = True
    """Export the model in Hugging Face format after the last step."""


class LoggingConfig(Section):
    """What is recorded on the way."""

    tensorboard: bool = True
    """Write TensorBoard event files into the run folder, if tensorboard is installed."""
    every: Count = 1
    """Steps between lines on the screen and points in TensorBoard; metrics.jsonl has every step."""
    style: Literal["isthmus", "megatron"] = "isthmus"
    """Words of a step's line on the screen: this program's own, or Megatron-LM's, for tools that read its logs."""
