"""Every setting of a run: name, type, unit, default and limits. Unknown settings are errors.

A setting is addressed by its dotted name (``optim.lr``) in a config file, on the command line and in messages.
Paths are taken relative to the working directory; ``~`` is the home folder.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from isthmus.config.recipes import RECIPE_SETTINGS, LearningRate, RecipeName
from isthmus.config.schema.chats import ChatConfig
from isthmus.config.schema.data import DOCUMENT_SETTINGS, DataConfig
from isthmus.config.schema.distillation import DistillConfig
from isthmus.config.schema.dpo import DpoConfig, KtoConfig, RewardConfig
from isthmus.config.schema.evaluation import EvalConfig
from isthmus.config.schema.grpo import GrpoConfig, RolloutConfig
from isthmus.config.schema.launch import LaunchConfig
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

    recipe: RecipeName
    """sft: fine-tune on chats; dpo: train on preference pairs; kto: train on answers with labels; reward: train a
    reward model on preference pairs; distill: learn the probabilities of a teacher on chats; grpo: reinforcement
    learning on prompts with rewards; pretrain: train on text."""
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
    grpo: GrpoConfig = GrpoConfig()
    rollout: RolloutConfig = RolloutConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    launch: LaunchConfig = LaunchConfig()
    callbacks: Annotated[tuple[str, ...], BeforeValidator(listed), Field(strict=False)] = ()
    """Your own code at the events of the run: module:Class, subclasses of isthmus.Callback."""
    platform: Literal["auto", "cpu", "cuda", "rocm"] = "auto"
    """Hardware to run on; auto: GPUs if there are any, else the CPU."""

    @model_validator(mode="before")
    @classmethod
    def _learning_rate_of_the_recipe(cls, values: Any) -> Any:
        """Fill in ``optim.lr`` and the warm-up; whatever is invalid has an error of its own."""
        optim, lora, model = (values.get(name) or {} for name in ("optim", "lora", "model"))
        if not all(isinstance(section, dict) for section in (optim, lora, model)):
            return values
        recipe = RECIPE_SETTINGS.get(values.get("recipe"))
        if recipe is None:
            return values
        adapters = lora.get("rank") is not None or lora.get("path") is not None
        default = recipe.learning_rate(adapters=adapters, random_weights=model.get("init") == "random")
        given = {name for name, value in optim.items() if value is not None}
        filled = {} if "lr" in given else {"lr": default.lr}
        without_warmup = ("constant", "wsd", "inverse_sqrt")
        if not given & {"warmup_steps", "warmup_fraction"} and optim.get("schedule") not in without_warmup:
            filled["warmup_fraction"] = default.warmup_fraction
        return values | {"optim": optim | filled}

    @property
    def default_learning_rate(self) -> LearningRate:
        """What ``optim.lr`` and the warm-up are if they are not given."""
        recipe, random_weights = RECIPE_SETTINGS[self.recipe], self.model.init == "random"
        return recipe.learning_rate(adapters=self.lora.enabled, random_weights=random_weights)

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
        recipe = RECIPE_SETTINGS[self.recipe]
        for name, reason in _foreign_data_settings(self.recipe).items():
            value = getattr(self.data, name)
            if value != DataConfig.model_fields[name].get_default(call_default_factory=True):
                shown = f"={value}" if isinstance(value, str) else ""
                refuse(f"data.{name}", f"{name}{shown} {reason}. Leave it out")
        if self.data.overlong == "split" and not recipe.splits_chats:
            refuse("data.overlong", "overlong=split is for chats: a part of an answer is no answer; use drop or error")
        if not self.chat.split_turns and not recipe.splits_chats:
            splitting = _recipes_with("splits_chats")
            refuse("chat.split_turns", f"split_turns is for the chats of {splitting}, got {self.recipe}; leave it out")
        if self.train.label_smoothing and not recipe.smooths_labels:
            has_smoothing = "label_smoothing" in type(getattr(self, self.recipe)).model_fields
            hint = f"use {self.recipe}.label_smoothing" if has_smoothing else "leave it out"
            smoothed = f"label_smoothing={self.train.label_smoothing:g} is for {_recipes_with('smooths_labels')}"
            refuse("train.label_smoothing", f"{smoothed}, got {self.recipe}; {hint}")
        for name, field in ChatConfig.model_fields.items() if recipe.takes_documents else ():
            if getattr(self.chat, name) != field.default:
                refuse(f"chat.{name}", f"chat.{name} is for chats, got recipe {self.recipe}; leave it out")
        if self.eval.generate and not recipe.generates:
            refuse(
                "eval.generate",
                f"eval.generate needs a language model, and recipe {self.recipe} trains a reward model; leave it out",
            )
        foreign = [(other, name) for other, settings in RECIPE_SETTINGS.items() for name in (other, *settings.sections)]
        for other, section_name in foreign:
            section = getattr(self, section_name, None)  # some recipes have no settings of their own
            for name, field in type(section).model_fields.items() if section and other != self.recipe else ():
                if (value := getattr(section, name)) != field.get_default(call_default_factory=True):
                    reason = f"{name}={value} is for recipe {other}, got {self.recipe}; leave it out"
                    refuse(f"{section_name}.{name}", reason)
        for setting in recipe.required:
            section_name, _, name = setting.partition(".")
            if getattr(getattr(self, section_name), name) in (None, ()):
                lacks(setting)
        return self

    @model_validator(mode="after")
    def _rollouts_fit(self) -> RunConfig:
        group, answers = self.rollout.group_size, self.grpo.updates_per_rollout * self.train.global_batch_size
        if "rollout" not in RECIPE_SETTINGS[self.recipe].sections:
            return self
        if self.rollout.max_new_tokens >= self.data.seq_length:
            tokens, length = self.rollout.max_new_tokens, self.data.seq_length
            refuse(
                "rollout.max_new_tokens",
                f"max_new_tokens={tokens} leaves no room for a prompt in data.seq_length={length}; lower it, or raise "
                "data.seq_length",
            )
        if answers % group:
            below = answers // group * group
            sizes = " or ".join(f"{size}" for size in (below, below + group) if size)
            refuse(
                "train.global_batch_size",
                f"a rollout has {answers} answers (grpo.updates_per_rollout x global_batch_size), which is not a "
                f"multiple of rollout.group_size={group}; use {sizes} answers",
            )
        if self.rollout.ahead and self.grpo.correction == "none":
            refuse(
                "rollout.ahead",
                f"ahead={self.rollout.ahead} trains on answers of earlier weights, and without a correction the "
                "gradient is biased; set grpo.correction=token, sequence or mask",
            )
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


def _recipes_with(trait: str) -> str:
    """The names of the recipes with a trait of :class:`RecipeSettings`."""
    return " and ".join(name for name, recipe in RECIPE_SETTINGS.items() if getattr(recipe, trait))


def _foreign_data_settings(name: RecipeName) -> dict[str, str]:
    """Settings of section ``data`` that are for other recipes, with the reason."""
    recipe, chats = RECIPE_SETTINGS[name], "is for the chats of sft"
    if recipe.takes_documents:
        return dict.fromkeys(
            ("loss_on", "overlong"), f"{chats}; in pretraining every token of the text is a loss token"
        )
    foreign = dict.fromkeys(DOCUMENT_SETTINGS, "is for the documents of pretraining")
    if recipe.answers is not None:
        foreign |= {
            "loss_on": f"{chats}; the loss of {name} is on the answers behind the prompt",
            "mock": f"makes no {recipe.answers}; give data.files",
            "length_buckets": f"is for packed single samples, and {name} packs {recipe.packed}",
        }
    return foreign
