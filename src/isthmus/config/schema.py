"""Every setting of a run: its name, type, unit, default and limits. Nothing else is accepted.

A setting is addressed by its dotted name (``optim.lr``) in a config file, on the command line and in messages.
Paths are taken relative to the working directory; ``~`` is the home folder.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal, NoReturn

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

PathText = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
# A mapping key is the likelier slip than a file that is named like one, so only text becomes a list of one.
Paths = Annotated[
    tuple[PathText, ...],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Field(strict=False),
]
Count = Annotated[int, Field(ge=1)]
RecomputedModule = Literal["core_attn", "mlp", "moe"]
_OF_PRECISION = {"fp16": ("initial_loss_scale", "loss_scale_window"), "fp8": ("fp8_scaling", "fp8_format")}
"""Settings that mean something in one precision only."""
# Elsewhere 0 is a usual spelling of "never"; here there is one inner form of it, so that no code can divide by it.
Interval = Annotated[Count | None, BeforeValidator(lambda value: None if type(value) is int and value == 0 else value)]


def _refuse(key: str, reason: str) -> NoReturn:
    """Report a clash between settings at the one of them that is to be changed; ``key`` is relative to the section."""
    # Braces are format marks to pydantic.
    raise PydanticCustomError("clash", "{reason}", {"reason": reason, "key": key})


class Section(BaseModel):
    """Settings that belong together: immutable, of exactly the stated types, without unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ModelConfig(Section):
    """The model to start from."""

    path: PathText
    """Hugging Face model folder: config, tokenizer and, unless init is random, the weights."""
    init: Literal["hf", "random"] = "hf"
    """Where the weights start: those of the folder, or random ones."""
    trust_remote_code: bool = False
    """Let the folder's own Python code build its tokenizer."""
    export_dtype: Literal["source", "float32", "bfloat16"] = "source"
    """Type of the exported weights; source: each tensor as it came."""


class DataConfig(Section):
    """What is learned from, and how it is cut."""

    files: Paths = Field(min_length=1)
    """Training files (JSON, JSON Lines or text); their record kinds are told apart by themselves."""
    valid_files: Paths = ()
    """Held-out files; if there are none, valid_fraction of the training samples is held out."""
    valid_fraction: float = Field(default=0.02, ge=0, lt=1)
    """Share of the training samples that is held out when there are no valid_files; 0: none."""
    seq_length: Count = 2048
    """Most tokens in a sequence."""
    packing: bool = True
    """Put several samples into one sequence; attention stays inside each sample."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order of the samples and of the held-out split."""
    loss_on: Literal["assistant", "all", "last"] = "assistant"
    """sft: which tokens of a chat are learned: every assistant turn, everything, or the last assistant turn."""
    overlong: Literal["truncate", "drop"] = "truncate"
    """sft: what happens to a sample of more than seq_length tokens."""
    on_error: Literal["stop", "skip"] = "stop"
    """What happens at a record that cannot be read: stop, or leave it out and count it."""


class ParallelConfig(Section):
    """How the model is laid out over the ranks; data parallelism takes the ranks that are left."""

    tp: Count = 1
    """Tensor parallel ranks: every matrix is cut into this many parts."""
    sp: bool | None = None
    """Sequence parallelism (activations outside the matrices are cut over tp); null: on when tp > 1."""
    pp: Count = 1
    """Pipeline parallel ranks: the layers are cut into this many stages."""
    vpp: Count = 1
    """Virtual stages of each pipeline rank: layers are dealt out in turns, and ranks idle less."""
    cp: Count = 1
    """Context parallel ranks: every micro batch is cut along its tokens into this many parts."""
    ep: Count = 1
    """Expert parallel ranks: the experts of a layer are dealt out over this many of the data parallel ranks."""
    etp: Count | None = None
    """Tensor parallel ranks of each expert; null: as many as tp."""
    fsdp: bool = False
    """Fully sharded data parallelism: weights, gradients and optimizer state are cut over the data parallel ranks."""
    join_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that a rank waits at the start for others that have not come yet."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that a rank waits within the run for another one that does not answer."""
    overlap_grad_reduce: bool | None = None
    """Sum gradients over the data parallel ranks while others are still computed; null: on a GPU, not on a CPU."""
    overlap_param_gather: bool | None = None
    """Gather updated weights while the next forward pass already runs; null: as overlap_grad_reduce."""

    @property
    def sequence_parallel(self) -> bool:
        """Whether sequence parallelism is on, with null resolved."""
        return self.tp > 1 if self.sp is None else self.sp

    @property
    def line_multiple(self) -> int:
        """Tokens of a line come in multiples of it: each cp rank has two equal stretches, cut over the tp ranks."""
        return self.tp * (2 * self.cp if self.cp > 1 else 1)

    @model_validator(mode="after")
    def _sizes_fit(self) -> ParallelConfig:
        if self.sp and self.tp == 1:
            _refuse("sp", "sp=true needs tp > 1, got tp=1; set parallel.tp, or leave parallel.sp out")
        if self.vpp > 1 and self.pp == 1:
            _refuse("vpp", f"vpp={self.vpp} needs pp > 1, got pp=1; set parallel.pp, or leave parallel.vpp out")
        for name in ("overlap_grad_reduce", "overlap_param_gather"):
            if self.fsdp and getattr(self, name) is not None:
                _refuse(name, f"fsdp=true has an overlap of its own, got {name} too; leave parallel.{name} out")
        if self.overlap_param_gather and self.overlap_grad_reduce is False:
            _refuse(
                "overlap_param_gather",
                "overlap_param_gather=true needs overlap_grad_reduce, got false; leave one of the two out",
            )
        return self


class MoeConfig(Section):
    """How mixtures of experts are trained."""

    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens reach experts on other ranks: sent to those they chose, or shown to all, which pays for few ranks."""
    capacity_factor: float | None = Field(default=None, gt=0)
    """Tokens an expert takes of each forward pass of a rank, over an even share; null: all, nothing is dropped."""
    aux_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the load-balancing loss over each micro batch."""
    seq_aux_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the load-balancing loss over each sample."""
    z_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the loss that keeps the router's logits small."""
    expert_bias_update_rate: float = Field(default=0.0, ge=0)
    """What the bias of each expert's choice changes by a step, towards an even load; for models that have this bias."""


class TrainConfig(Section):
    """How long, how much at once, and in which numbers."""

    steps: Count | None = None
    """Optimizer steps; give this or epochs."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the training data, also in parts; 1 when steps is not given either."""
    global_batch_size: Count = 16
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: Count = 1
    """Sequences per forward pass of one data parallel rank."""
    precision: Literal["fp32", "bf16", "fp16", "fp8"] | None = None
    """Numbers of the model's arithmetic (all but fp32 keep float32 main weights); null: what suits the platform."""
    initial_loss_scale: float = Field(default=4096.0, ge=1)
    """fp16: what the loss is multiplied by at first; halved, down to 1, by each step whose gradient overflows."""
    loss_scale_window: Count = 1000
    """fp16: steps in a row without overflow after which the loss scale is doubled."""
    fp8_scaling: Literal["tensorwise", "rowwise"] = "tensorwise"
    """fp8: one scale for each matrix, or one for each of its rows and columns."""
    fp8_format: Literal["hybrid", "e4m3"] = "hybrid"
    """fp8: hybrid has gradients in e5m2, of more range and less precision; e4m3 has everything in e4m3."""
    seed: int = Field(default=0, ge=0)
    """Seed of random weights and of the random streams of training."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that are computed again in the backward pass instead of being kept."""
    mtp_loss_weight: float = Field(default=0.1, gt=0)
    """What the loss of layers that predict ahead counts beside the model's own, where the weights have such layers."""
    recompute_modules: Annotated[tuple[RecomputedModule, ...], Field(strict=False)] = ("core_attn",)
    """selective: what is computed again: attention's core, dense feed-forward blocks, mixtures of experts."""
    recompute_layers: Count | None = None
    """full: layers of each pipeline stage, its first ones, that are computed again; null: all of them."""
    eval_every: Interval = None
    """Steps between evaluations on held-out data; null or 0: only before the first and after the last step."""
    profile: Annotated[str, Field(pattern=r"^[1-9][0-9]*-[1-9][0-9]*$")] | None = None
    """Steps to profile, first and last, such as 3-5: a trace and a table of each rank in the run folder; null: none."""
    threads: Count | None = None
    """CPU threads per rank; null: the machine's cores shared out evenly among its ranks."""

    @model_validator(mode="before")
    @classmethod
    def _one_epoch_by_default(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("steps") is None and given.get("epochs") is None:
            return given | {"epochs": 1.0}
        return given

    @property
    def profiled_steps(self) -> range:
        """Steps to profile, counted from 1; empty for none."""
        if self.profile is None:
            return range(0)
        first, last = map(int, self.profile.split("-"))
        return range(first, last + 1)

    @model_validator(mode="after")
    def _profile_fits(self) -> TrainConfig:
        steps = self.profiled_steps
        if self.profile is not None and not steps:
            _refuse("profile", f"profile={self.profile} ends before it begins; give the first step, then the last")
        if steps and self.steps is not None and steps[-1] > self.steps:
            _refuse(
                "profile",
                f"profile={self.profile} goes beyond the {self.steps} steps of the run; name steps from 1 to "
                f"{self.steps}",
            )
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> TrainConfig:
        if self.steps is not None and self.epochs is not None:
            _refuse("epochs", f"steps={self.steps} and epochs={self.epochs:g} are both given; keep one of them")
        if self.recompute_layers is not None and self.recompute != "full":
            _refuse(
                "recompute_layers",
                f"recompute_layers={self.recompute_layers} belongs to recompute=full, got {self.recompute}; "
                "leave it out",
            )
        if self.recompute_modules not in (("core_attn",), ()) and self.recompute != "selective":
            _refuse(
                "recompute_modules",
                f"recompute_modules belongs to recompute=selective, got {self.recompute}; leave it out",
            )
        if not self.recompute_modules:
            _refuse("recompute_modules", "recompute_modules names nothing; use core_attn, mlp or moe")
        for precision, names in _OF_PRECISION.items():
            for name in names if self.precision != precision else ():
                if getattr(self, name) != type(self).model_fields[name].default:
                    _refuse(name, f"{name} belongs to precision={precision}, got {self.precision}; leave it out")
        if self.global_batch_size % self.micro_batch_size:
            below = self.global_batch_size // self.micro_batch_size * self.micro_batch_size
            near = " or ".join(str(size) for size in (below, below + self.micro_batch_size) if size)
            _refuse(
                "global_batch_size",
                f"global_batch_size={self.global_batch_size} is not a multiple of "
                f"micro_batch_size={self.micro_batch_size}; use {near} sequences",
            )
        return self


class OptimConfig(Section):
    """AdamW and its learning rate schedule."""

    lr: float = Field(default=2e-5, gt=0)
    """Peak learning rate."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the last step (not for the constant schedule)."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """How lr falls to min_lr after the warm-up; wsd (warm-up, stable, decay) falls in the last decay_steps only."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0 to lr."""
    decay_steps: Count | None = None
    """Steps of the final fall; needed with schedule wsd and only there."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of the matrices; norms and biases have none."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest gradient norm; a longer gradient is scaled down to it. 0: off."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the running mean of the gradient."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the running mean of the squared gradient."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the squared gradient's mean."""

    @model_validator(mode="after")
    def _schedule_fits(self) -> OptimConfig:
        if self.min_lr > self.lr:
            _refuse("min_lr", f"min_lr={self.min_lr:g} is above lr={self.lr:g}; lower it")
        if self.schedule == "wsd" and self.decay_steps is None:
            _refuse("decay_steps", "schedule wsd needs decay_steps, the number of steps of its final fall")
        if self.schedule != "wsd" and self.decay_steps is not None:
            _refuse(
                "decay_steps",
                f"decay_steps={self.decay_steps} belongs to schedule wsd, got {self.schedule}; leave it out",
            )
        return self


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


class LoggingConfig(Section):
    """What is recorded on the way."""

    tensorboard: bool = True
    """Write TensorBoard event files into the run folder, if tensorboard is installed."""
    every: Count = 1
    """Steps between lines on the screen and in metrics.jsonl."""


class RunConfig(Section):
    """A whole run."""

    recipe: Literal["sft", "pretrain"]
    """sft: learn the answers of chats; pretrain: learn all of the text."""
    out: PathText
    """Run folder: metrics, resolved config, checkpoints and the exported model."""
    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
    moe: MoeConfig = MoeConfig()
    train: TrainConfig = TrainConfig(epochs=1.0)
    optim: OptimConfig = OptimConfig()
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
            _refuse("optim.warmup_steps", f"warmup_steps={warmup}{falls} {verb} not fit in train.steps={steps}")
        return self

    @model_validator(mode="after")
    def _chats_have_their_settings(self) -> RunConfig:
        defaults = {"loss_on": "assistant", "overlong": "truncate"}
        for name, default in defaults.items() if self.recipe == "pretrain" else ():
            if getattr(self.data, name) != default:
                _refuse(
                    f"data.{name}",
                    f"{name}={getattr(self.data, name)} is for the chats of sft; "
                    "pretraining learns every token of the text, in pieces of seq_length. Leave it out",
                )
        return self
