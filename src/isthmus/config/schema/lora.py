"""Low-rank adapters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from isthmus.config.schema.section import Count, PathText, Section, listed, refuse

Names = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    BeforeValidator(listed, json_schema_input_type=str | tuple[str, ...]),
    Field(strict=False),
]
_ADAPTER_SETTINGS = ("rank", "alpha", "targets", "modules_to_save", "init", "dora", "rslora")
"""Settings that an existing adapter has."""


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685): all other weights are frozen. rank or path turns them on."""

    rank: Count | None = None
    """Rank of the adapters; null: no adapters, unless path is given."""
    alpha: float | None = Field(default=None, gt=0)
    """An adapter is multiplied by alpha / rank; null: twice the rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate of the inputs of adapters."""
    targets: Names = ("all-linear",)
    """Linear layers with adapters, by the names of transformers: all-linear, q_proj, a path, or a pattern of paths."""
    modules_to_save: Names = ()
    """Other modules of the Hugging Face model that are trained whole, such as embed_tokens or lm_head: all whose path
    ends so, as in PEFT (norm also means q_norm)."""
    init: str = Field(default="kaiming", pattern=r"^(kaiming|gaussian|pissa(_niter_[1-9][0-9]?)?)$")
    """Initial adapters, as in PEFT. B is zero and A uniform (kaiming) or normal with standard deviation 1 / rank
    (gaussian), or B A is the part of the weight with the largest singular values, which is subtracted from it (pissa,
    arXiv 2404.02948; pissa_niter_4 computes it with 4 iterations, much faster)."""
    dora: bool = False
    """Also train the magnitude of each row of the adapted weights (DoRA, arXiv 2402.09353)."""
    rslora: bool = False
    """Multiply adapters by alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732)."""
    lr_ratio: float = Field(default=1.0, ge=1)
    """Learning rate of B, and of vectors, over that of A (LoRA+, arXiv 2402.12354)."""
    path: PathText | None = None
    """Start from this adapter: a folder that PEFT or an earlier run wrote."""
    quantize: Literal["nf4", "int8"] | None = None
    """Frozen weights of linear layers have 4 bits (nf4, QLoRA, arXiv 2305.14314) or 8 (int8), as in bitsandbytes."""

    @property
    def enabled(self) -> bool:
        """Whether the run trains adapters."""
        return self.rank is not None or self.path is not None

    def scale(self, rank: int) -> float:
        """The factor of ``B @ A`` of an adapter of this rank."""
        return self.alpha_of(rank) / (rank**0.5 if self.rslora else rank)

    def alpha_of(self, rank: int) -> float:
        """``alpha`` with its default."""
        return 2 * rank if self.alpha is None else self.alpha

    @model_validator(mode="after")
    def _settings_are_used(self) -> LoraConfig:
        changed = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        if not self.enabled and changed:
            refuse(
                changed[0], f"{changed[0]} is for adapters, and rank is not set; set rank, such as 16, or leave it out"
            )
        fixed = [name for name in changed if name in _ADAPTER_SETTINGS]
        if self.path is not None and fixed:
            refuse(fixed[0], f"{fixed[0]} is that of the adapter in path; leave it out, or leave out path")
        if self.dora and self.dropout:
            refuse(
                "dropout",
                f"dropout={self.dropout:g} with dora=true would multiply all base weights a second time, with the "
                "dropped inputs; leave one of them out",
            )
        return self
