"""Distillation from a teacher model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from isthmus.config.presets import PREFIX, is_model_file, not_a_preset
from isthmus.config.schema.section import Count, PathText, Section, refuse


class DistillConfig(Section):
    """Distillation: the student, model.path, learns the token probabilities of a teacher (arXiv 2306.13649)."""

    teacher: PathText | None = None
    """Hugging Face model folder or Hub id of the teacher, of any family; its tokenizer must be the student's."""
    teacher_config: dict[str, Any] = Field(default_factory=dict)
    """Keys of a config.json that override those of the teacher, as in model.config."""
    teacher_init: Literal["hf", "random"] = "hf"
    """Weights of the teacher: those of the folder (hf), or random ones to test a layout or its memory."""
    teacher_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the teacher's weights and activations; null: that of the student's activations."""
    beta: float = Field(default=0.0, ge=0, le=1)
    """Divergence between the probabilities of teacher t and student s: 0: forward KL(t, s); 1: reverse KL(s, t);
    between: generalized JSD, beta KL(t, m) + (1 - beta) KL(s, m) for the mixture m = beta t + (1 - beta) s."""
    temperature: float = Field(default=1.0, gt=0)
    """Both models' logits are divided by it in the divergence, whose value is not multiplied by its square."""
    top_k: Count | None = None
    """Compare the teacher's most probable tokens one by one and all others as a single one; null: all one by one."""
    sft_weight: float = Field(default=0.0, ge=0)
    """Weight of the cross entropy of the labels, as in sft, added to the divergence."""

    @model_validator(mode="after")
    def _teacher_has_weights(self) -> DistillConfig:
        if (
            self.teacher is not None
            and self.teacher.startswith(PREFIX)
            and (why := not_a_preset(self.teacher, "models"))
        ):
            refuse("teacher", why.removesuffix("."))
        if self.teacher is not None and is_model_file(self.teacher) and self.teacher_init != "random":
            refuse(
                "teacher",
                f"{self.teacher} has no weights; give a model folder or a Hub id, or set distill.teacher_init=random",
            )
        return self
