"""Every setting of a run: name, type, unit, default and limits. Unknown settings are errors.

A setting is addressed by its dotted name (``optim.lr``) in a config file, on the command line and in messages.
Paths are taken relative to the working directory; ``~`` is the home folder.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from isthmus.config.schema.chats import ChatConfig
from isthmus.config.schema.data import DOCUMENT_SETTINGS, DataConfig
from isthmus.config.schema.distillation import DistillConfig
from isthmus.config.schema.dpo import DpoConfig, KtoConfig, RewardConfig
from isthmus.config.schema.evaluation import EvalConfig
from isthmus.config.schema.lora import LoraConfig
from isthmus.config.schema.model import ModelConfig, TokenizerConfig
from isthmus.config.schema.moe import MoeConfig
from isthmus.config.schema.optim import OptimConfig
from isthmus.config.schema.output import CheckpointConfig, LoggingConfig
from isthmus.config.schema.parallel import ParallelConfig
from isthmus.config.schema.section import PathText, Section, lacks, listed, refuse
from isthmus.config.schema.train import TrainConfig, TuneConfig


class RunConfig(Section):
    """All settings of a run."""

    recipe: Literal["sft", "dpo", "kto", "reward", "distill", "pretrain"]
    """sft: fine-tune on chats; dpo: train on preference pairs; kto: train on answers with labels; reward: train a
    reward model on preference pairs; distill: learn the probabilities of a teacher on chats; pretrain: train on
    text."""
    out: PathText
    """Run folder for metrics, resolved config, checkpoints and the exported model."""
    model: ModelConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig
    chat: ChatConfig = ChatConfig()
    parallel: ParallelConfig = ParallelConfig()
    moe: MoeConfig = MoeConfig()
    train: TrainConfig = TrainConfig(epochs=1.0)
    tune: TuneConfig = TuneConfig()
    optim: OptimConfig = OptimConfig()
    dpo: DpoConfig = DpoConfig()
    distill: DistillConfig = DistillConfig()
    lora: LoraConfig = LoraConfig()
    eval: EvalConfig = EvalConfig()
    kto: KtoConfig = KtoConfig()
    reward: RewardConfig = RewardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    callbacks: Annotated[tuple[str, ...], BeforeValidator(listed), Field(strict=False)] = ()
    """Your own code at the events of the run: module:Class, subclasses of isthmus.Callback."""
    platform: Literal["auto", "cpu", "cuda", "rocm"] = "auto"
    """Hardware to run on; auto: GPUs if there are any, else the CPU."""

    @model_validator(mode="after")
    def _schedule_fits_steps(self) -> RunConfig:
        steps, decay = self.train.steps, self.optim.decay_steps or 0
        warmup = self.optim.warmup(steps or 0)
        if steps is not None and (warmup >= steps or warmup + decay > steps):
            both = f" and decay_steps={decay} do" if decay else " does"
            reason = f"warmup_steps={warmup}{both} not fit in train.steps={steps}; lower it, or raise train.steps"
            refuse("optim.warmup_steps", reason)
        return self

    @model_validator(mode="after")
    def _settings_belong_to_the_recipe(self) -> RunConfig:
        chats = "is for the chats of sft"
        text = f"{chats}; in pretraining every token of the text is a loss token"
        documents = dict.fromkeys(DOCUMENT_SETTINGS, "is for the documents of pretraining")
        foreign = {
            "sft": documents,
            "distill": documents,
            "pretrain": {"loss_on": text, "overlong": text},
        } | {
            recipe: documents
            | {
                "loss_on": f"{chats}; the loss of {recipe} is on the answers behind the prompt",
                "mock": f"makes no {records}; give data.files",
                "length_buckets": f"is for packed single samples, and {recipe} packs {packed}",
            }
            for recipe, records, packed in (
                ("dpo", "preference pairs", "pairs"),
                ("kto", "answers with labels", "answers by length"),
                ("reward", "preference pairs", "pairs"),
            )
        }
        for name, why in foreign.get(self.recipe, {}).items():
            value = getattr(self.data, name)
            if value != DataConfig.model_fields[name].get_default(call_default_factory=True):
                shown = f"={value}" if isinstance(value, str) else ""
                refuse(f"data.{name}", f"{name}{shown} {why}. Leave it out")
        if self.data.overlong == "split" and self.recipe not in ("sft", "distill"):
            refuse("data.overlong", "overlong=split is for chats: a part of an answer is no answer; use drop or error")
        if not self.chat.split_turns and self.recipe not in ("sft", "distill"):
            refuse(
                "chat.split_turns", f"split_turns is for the chats of sft and distill, got {self.recipe}; leave it out"
            )
        if self.train.label_smoothing and self.recipe not in ("sft", "pretrain"):
            hint = "use dpo.label_smoothing" if self.recipe == "dpo" else "leave it out"
            smoothed = f"label_smoothing={self.train.label_smoothing:g} is for sft and pretrain, got {self.recipe}"
            refuse("train.label_smoothing", f"{smoothed}; {hint}")
        for name, field in ChatConfig.model_fields.items() if self.recipe == "pretrain" else ():
            if getattr(self.chat, name) != field.default:
                refuse(f"chat.{name}", f"chat.{name} is for chats, got recipe pretrain; leave it out")
        if self.recipe == "reward" and self.eval.generate:
            refuse(
                "eval.generate",
                "eval.generate needs a language model, and recipe reward trains a reward model; leave it out",
            )
        sections = {"dpo": self.dpo, "kto": self.kto, "reward": self.reward, "distill": self.distill}
        for recipe, section in sections.items():
            for name, field in type(section).model_fields.items() if self.recipe != recipe else ():
                if (value := getattr(section, name)) != field.get_default(call_default_factory=True):
                    why = f"{name}={value} is for recipe {recipe}, got {self.recipe}; leave it out"
                    refuse(f"{recipe}.{name}", why)
        if self.recipe == "distill" and self.distill.teacher is None:
            lacks("distill.teacher")
        return self

    @model_validator(mode="after")
    def _adapters_are_merged(self) -> RunConfig:
        if not self.checkpoint.export_merged and not self.lora.enabled:
            reason = "export_merged=false exports adapters alone, and this run has none"
            refuse("checkpoint.export_merged", f"{reason}; set lora.rank, or leave it out")
        return self

    @model_validator(mode="after")
    def _quantized_weights_are_dequantized(self) -> RunConfig:
        if self.lora.quantize is not None and self.train.precision == "fp8":
            reason = "multiplies weights of 16 bits in train.precision=bf16 or fp32, not in fp8; leave one of them out"
            refuse("lora.quantize", f"quantize={self.lora.quantize} {reason}")
        return self

    @model_validator(mode="after")
    def _mock_data_needs_steps(self) -> RunConfig:
        if self.data.mock and self.train.steps is None:
            refuse("data.mock", "mock=true makes an endless data set without epochs; give train.steps")
        return self

    @model_validator(mode="after")
    def _buckets_fit_packed_sequences(self) -> RunConfig:
        buckets, multiple = self.data.length_buckets, self.parallel.length_multiple
        odd = [bucket for bucket in buckets if bucket % multiple]
        size, seq_length = self.train.micro_batch_size, self.data.seq_length
        if odd:
            refuse(
                "data.length_buckets",
                f"length_buckets must be multiples of {multiple} because tp={self.parallel.tp} and "
                f"cp={self.parallel.cp} ranks split a packed sequence evenly, got {odd[0]}; use "
                f"{odd[0] + -odd[0] % multiple}",
            )
        if buckets and buckets[-1] < size * seq_length:
            longest = size * seq_length + -size * seq_length % multiple
            refuse(
                "data.length_buckets",
                f"length_buckets ends at {buckets[-1]}, but a packed sequence can have micro_batch_size={size} x "
                f"seq_length={seq_length} tokens; add {longest}",
            )
        return self
