"""Length, batch sizes and precision of a run."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from isthmus.config.schema.section import Count, Interval, PathText, Section, Seed, Sequences, refuse

RecomputedModule = Literal["core_attn", "mlp", "moe", "layernorm", "mlp_act", "moe_act", "rope"]
_PRECISION_SETTINGS = {
    "fp16": ("initial_loss_scale", "loss_scale_window"),
    "fp8": ("fp8_scaling", "fp8_format", "fp8_experts", "emulate_fp8"),
}
"""Settings that apply to one precision only."""


class TuneConfig(Section):
    """Measured choices of matmul kernels."""

    file: PathText | None = None
    """File of isthmus tune for this model, layout and device: the fastest library or GPU kernel of each matmul, and on
    a CPU the number of threads. %d in the name is the number of the GPU."""


class TrainConfig(Section):
    """Length, batch sizes, precision and recomputation."""

    exclusive: ClassVar[tuple[str, ...]] = ("steps", "epochs")
    steps: Count | None = None
    """Optimizer steps; give this or epochs."""
    epochs: float | None = Field(default=None, gt=0, le=1e6)
    """Passes over the training data, also fractions; 1 if steps is not given."""
    global_batch_size: Sequences = 16
    """Sequences (dpo, reward: pairs; kto, grpo: answers) per optimizer step, over all ranks. Not given: halved, also
    several times, while train.epochs are less than 20 steps; not for the loss kto and for grpo."""
    micro_batch_size: Sequences = 1
    """Sequences (dpo, reward: pairs; kto, grpo: answers) per forward pass of one data parallel rank."""
    precision: Literal["fp32", "bf16", "fp16", "fp8"] | None = None
    """Precision of matmuls and activations; all but fp32 keep float32 main weights. null: the platform's default."""
    initial_loss_scale: float = Field(default=4096.0, ge=1, le=1e12)
    """fp16: initial loss scale; each step whose gradient overflows halves it, down to 1."""
    loss_scale_window: Count = 1000
    """fp16: the loss scale is doubled after this many steps in a row without overflow."""
    fp8_scaling: Literal["tensorwise", "rowwise", "blockwise", "mxfp8"] = "tensorwise"
    """fp8: one scale per tensor (tensorwise) or per row and column (rowwise); unmeasured: one per 128 elements and 128
    x 128 weights (blockwise; sm_90), or a power of two per 32 elements (mxfp8; sm_100 and newer, gfx950)."""
    fp8_format: Literal["hybrid", "e4m3"] = "hybrid"
    """fp8: hybrid uses e5m2 (more range, less precision) for gradients and e4m3 for the rest; e4m3: all e4m3."""
    fp8_experts: bool = False
    """fp8: compute matmuls of routed experts and of their input gradients in e4m3 with a scale for each row, whatever
    fp8_scaling and fp8_format are; unmeasured."""
    emulate_fp8: bool = False
    """fp8: on a CPU, round the inputs of matmuls to FP8 and multiply them in float32, to rehearse an FP8 run."""
    gemm_tuning: bool = False
    """AMD GPUs: measure the GEMM kernels for each new shape and use the fastest (TunableOp); first steps are slow."""
    compile: bool | Literal["auto"] = "auto"
    """Fuse norms, activations and other elementwise parts with torch.compile: auto: on GPUs with Triton; true: also on
    a CPU, with a C++ compiler. The first steps take longer.
    """
    deterministic: bool = False
    """GPUs: use only kernels that give the same bits in each run, so that a resumed run equals an uninterrupted one;
    slower. A CPU always does.
    """
    batch_invariant: bool = False
    """GPUs, bf16 and fp16: matmuls whose results for a token do not depend on the other tokens of a batch (Triton
    kernels), so that log-probabilities in generation and in training differ less; slower. Attention is not among them.
    """
    share_prefixes: bool | Literal["auto"] = "auto"
    """dpo, reward, grpo: compute the tokens of a prompt once for all its answers in a micro batch; the same numbers to
    rounding. auto: on a CPU, where the model allows it; on GPUs its speed is not measured.
    """
    seed: Seed = 0
    """Seed of random weights and of the random number generators."""
    attention_dropout: float | None = Field(default=None, ge=0, lt=1)
    """Dropout rate of attention probabilities; null: that of the model's config."""
    hidden_dropout: float | None = Field(default=None, ge=0, lt=1)
    """Dropout rate of embeddings and of the outputs of attention and feed-forward blocks; null: as in the model's
    config.
    """
    neftune_alpha: float = Field(default=0.0, ge=0)
    """NEFTune: magnitude of uniform noise on the embeddings in training, alpha / sqrt(tokens of the sample x hidden
    size); 0: none, 5 is common."""
    attention: Literal["auto", "varlen", "cudnn", "flex", "sdpa", "blocks"] = "auto"
    """Attention backend: auto selects and verifies one at start-up; see the page on precision and memory."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation in the backward pass: of selected modules, or of full layers."""
    freeze: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Tensors that are not trained, by patterns of their Hugging Face names, such as ["model.embed_tokens.*"]; they
    have no gradients and no optimizer state."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """sft, pretrain: weight of the mean loss over the whole vocabulary; that of the label is one minus it. Validation
    and test losses are without it."""
    mtp_loss_weight: float = Field(default=0.1, gt=0)
    """Weight of the loss of MTP layers (multi-token prediction), if the model has any."""
    recompute_modules: Annotated[tuple[RecomputedModule, ...], Field(strict=False)] = ("core_attn",)
    """selective: what to recompute: core_attn, mlp (dense MLPs) and moe (MoE layers); without matmuls: layernorm (norms
    before blocks), mlp_act and moe_act (activations of MLPs and experts), rope (rotated queries and keys).
    """
    recompute_layers: Count | None = None
    """full: number of layers to recompute, the first ones of each pipeline stage; null: all."""
    eval_every: Interval = None
    """Steps between validations; null or 0: only before the first and after the last step."""
    early_stopping: Count | None = None
    """End training after this many validations in a row without a lower loss; needs eval_every. null: never."""
    profile: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}-[1-9][0-9]{0,8}$")] | None = None
    """First and last step to profile, such as 3-5: writes a trace and a table per rank. null: no profile."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads per rank; null: the cores of the machine divided by its ranks. A single rank leaves out cores that
    other processes use when the run begins."""

    @model_validator(mode="before")
    @classmethod
    def _one_epoch_by_default(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("steps") is None and values.get("epochs") is None:
            return values | {"epochs": 1.0}
        return values

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
            refuse("profile", f"profile must be FIRST-LAST, got {self.profile}; give the first step, then the last")
        if steps and self.steps is not None and steps[-1] > self.steps:
            refuse(
                "profile",
                f"profile={self.profile} is outside of the {self.steps} steps of the run; use steps from 1 to "
                f"{self.steps}",
            )
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> TrainConfig:
        if self.steps is not None and self.epochs is not None:
            refuse("epochs", f"got steps={self.steps} and epochs={self.epochs:g}; keep one of them")
        if self.recompute_layers is not None and self.recompute != "full":
            refuse(
                "recompute_layers",
                f"recompute_layers={self.recompute_layers} is for recompute=full, got {self.recompute}; leave it out",
            )
        if self.recompute_modules not in (("core_attn",), ()) and self.recompute != "selective":
            refuse(
                "recompute_modules",
                f"recompute_modules is for recompute=selective, got {self.recompute}; leave it out",
            )
        if not self.recompute_modules:
            refuse(
                "recompute_modules", f"recompute_modules must not be empty; use {', '.join(get_args(RecomputedModule))}"
            )
        if self.deterministic and self.gemm_tuning:
            refuse(
                "deterministic",
                "gemm_tuning=true selects kernels by their speed, which differs from run to run, so deterministic=true "
                "does not hold; keep one of them",
            )
        for precision, names in _PRECISION_SETTINGS.items():
            for name in names if self.precision != precision else ():
                if getattr(self, name) != type(self).model_fields[name].default:
                    refuse(name, f"{name} is for precision={precision}, got {self.precision}; leave it out")
        if self.global_batch_size % self.micro_batch_size:
            below = self.global_batch_size // self.micro_batch_size * self.micro_batch_size
            near = " or ".join(str(size) for size in (below, below + self.micro_batch_size) if size)
            refuse(
                "global_batch_size",
                f"global_batch_size={self.global_batch_size} is not a multiple of "
                f"micro_batch_size={self.micro_batch_size}; use {near} sequences",
            )
        return self
