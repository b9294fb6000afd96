"""The teacher of distillation: its tokenizer and this rank's part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isthmus.config.schema import RunConfig
from isthmus.errors import MissingInput, UsageError
from isthmus.hf.model_folder import tokenizer_files
from isthmus.hf.tokenizer.tokenizer import Tokenizer, load_tokenizer
from isthmus.platforms.base import Platform
from isthmus.recipes.model.rank_model import build_rank_model
from isthmus.recipes.plan.model_plan import ModelPlan, teacher_config

if TYPE_CHECKING:
    from isthmus.engine.parallel.process_groups import Position
    from isthmus.engine.teacher import Teacher

_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def teacher_precision(config: RunConfig, precision: str) -> str:
    """``train.precision`` of a model with the dtype of the teacher; ``precision`` is the student's."""
    if config.distill.teacher_dtype is not None:
        return _PRECISIONS[config.distill.teacher_dtype]
    return "bf16" if precision == "fp8" else precision


def check_teacher(config: RunConfig, plan: ModelPlan, tokenizer: Tokenizer, platform: Platform) -> None:
    """Check the teacher's dtype, and that its tokenizer has the tokens of ``tokenizer``."""
    if plan.teacher is None:
        return
    if (dtype := config.distill.teacher_dtype) is not None:
        supported, reason = platform.supports(_PRECISIONS[dtype])
        if not supported:
            raise UsageError(f"distill.teacher_dtype={dtype} cannot be used here: {reason}. Leave it out.")
        if config.parallel.fsdp and dtype == "float16":
            raise UsageError("distill.teacher_dtype=float16 with parallel.fsdp is not supported. Use bfloat16.")
    if config.data.mock:  # random tokens
        return
    folder = plan.teacher.source.path
    if not tokenizer_files(folder):
        raise MissingInput(
            f"distill.teacher={folder} has no tokenizer to compare with the student's. Add its tokenizer files."
        )
    here = tokenizer.inner.get_vocab()
    there = load_tokenizer(folder, trust_remote_code=config.model.trust_remote_code).inner.get_vocab()
    if here == there:
        return
    others = sorted(token for token in here.keys() | there.keys() if here.get(token) != there.get(token))
    ids = " and ".join(str(vocabulary.get(others[0], "absent")) for vocabulary in (here, there))
    raise UsageError(
        f"the tokenizers of the student and of distill.teacher={folder} differ in {len(others)} tokens: {others[0]!r} "
        f"is {ids}. Their probabilities are compared token by token; use models with the same tokenizer."
    )


def teacher_messages(config: RunConfig, plan: ModelPlan, precision: str) -> list[str]:
    """Lines for the log; none without distillation."""
    if (teacher := plan.teacher) is None:
        return []
    teacher_dtype = teacher_precision(config, precision)
    line = f"teacher {teacher.source}: {teacher.family.name}, {teacher.architecture.num_layers} layers, {teacher_dtype}"
    return [line, *(f"teacher: {note}" for note in teacher.weights.notes)]


def build_teacher(
    config: RunConfig, plan: ModelPlan, platform: Platform, position: Position, precision: str
) -> Teacher | None:
    """Build this rank's part of the teacher and read its weights; None without distillation."""
    from isthmus.engine.teacher import Teacher

    if plan.teacher is None:
        return None
    teacher_settings = teacher_config(config)
    model = build_rank_model(
        teacher_settings, plan.teacher, platform, position, teacher_precision(config, precision), training=False
    )
    return Teacher(model.stages, config.distill)
