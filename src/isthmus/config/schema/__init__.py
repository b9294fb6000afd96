"""Every setting of a run: its name, type, unit, default and limits. Nothing else is accepted.

A setting is addressed by its dotted name (``optim.lr``) in a config file, on the command line and in messages.
Paths are taken relative to the working directory; ``~`` is the home folder.
"""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from isthmus.config.schema.data import DataConfig
from isthmus.config.schema.dpo import DpoConfig
from isthmus.config.schema.model import ModelConfig, TokenizerConfig
from isthmus.config.schema.moe import MoeConfig
from isthmus.config.schema.optim import OptimConfig
from isthmus.config.schema.output import CheckpointConfig, LoggingConfig
from isthmus.config.schema.parallel import ParallelConfig
from isthmus.config.schema.section import PathText, Section, refuse
from isthmus.config.schema.train import TrainConfig


class RunConfig(Section):
    """A whole run."""

    recipe: Literal["sft", "dpo", "pretrain"]
    """sft: learn the answers of chats; dpo: prefer one answer to another; pretrain: learn all of the text."""
    out: PathText
    """Run folder: metrics, resolved config, checkpoints and the exported model."""
    model: ModelConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
    moe: MoeConfig = MoeConfig()
    train: TrainConfig = TrainConfig(epochs=1.0)
    optim: OptimConfig = OptimConfig()
    dpo: DpoConfig = DpoConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    platform: Literal["auto", "cpu", "cuda", "rocm"] = "auto"
    """Hardware to run on; auto: a GPU if there is one."""

    @model_validator(mode="after")
    def _schedule_fits_steps(self) -> RunConfig:
        steps, warmup, decay = self.train.steps, self.optim.warmup_steps, self.optim.decay_steps or 0
        if steps is not None and (warmup >= steps or warmup + decay > steps):
            falls = f" and decay_steps={decay}" if decay else ""
            verb = "do" if decay else "does"
            refuse("optim.warmup_steps", f"warmup_steps={warmup}{falls} {verb} not fit in train.steps={steps}")
        return self

    @model_validator(mode="after")
    def _recipes_have_their_settings(self) -> RunConfig:
        chats = "is for the chats of sft"
        text = f"{chats}; pretraining learns every token of the text, in pieces of seq_length"
        foreign = {
            "pretrain": {"loss_on": text, "overlong": text},
            "dpo": {
                "loss_on": f"{chats}; of a pair, dpo takes what the assistant says behind the prompt",
                "mock": "makes no pairs of answers; give data.files",
                "length_buckets": "are for lines of single samples, and those of dpo hold pairs",
            },
        }
        for name, why in foreign.get(self.recipe, {}).items():
            value = getattr(self.data, name)
            if value != DataConfig.model_fields[name].get_default(call_default_factory=True):
                shown = f"={value}" if isinstance(value, str) else ""
                refuse(f"data.{name}", f"{name}{shown} {why}. Leave it out")
        for name, field in DpoConfig.model_fields.items() if self.recipe != "dpo" else ():
            if (value := getattr(self.dpo, name)) != field.default:
                refuse(f"dpo.{name}", f"{name}={value} is for the recipe dpo, got {self.recipe}; leave it out")
        return self

    @model_validator(mode="after")
    def _mock_ends(self) -> RunConfig:
        if self.data.mock and self.train.steps is None:
            refuse("data.mock", "mock=true makes samples without end, so there is no epoch of them; give train.steps")
        return self

    @model_validator(mode="after")
    def _buckets_hold_lines(self) -> RunConfig:
        buckets, multiple = self.data.length_buckets, self.parallel.line_multiple
        odd = [bucket for bucket in buckets if bucket % multiple]
        size, seq_length = self.train.micro_batch_size, self.data.seq_length
        if odd:
            refuse(
                "data.length_buckets",
                f"lines are cut over tp={self.parallel.tp} and cp={self.parallel.cp} ranks into equal parts, so "
                f"length_buckets must be multiples of {multiple}, got {odd[0]}; use {odd[0] + -odd[0] % multiple}",
            )
        if buckets and buckets[-1] < size * seq_length:
            longest = size * seq_length + -size * seq_length % multiple
            refuse(
                "data.length_buckets",
                f"length_buckets ends at {buckets[-1]}, but a line may have micro_batch_size={size} x "
                f"seq_length={seq_length} tokens; add {longest}",
            )
        return self
