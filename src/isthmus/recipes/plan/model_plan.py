"""The model of a run, its parallel layout, and checks of the training settings; all raise UsageError."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

from isthmus.config.schema import MoeConfig, OptimConfig, ParallelConfig, RunConfig, TrainConfig
from isthmus.config.schema.lora import LoraConfig
from isthmus.config.schema.model import ModelConfig
from isthmus.convert.hf.hf_weights import OpenedHfWeights, open_weights, with_score_head
from isthmus.convert.merged_weights import MergedWeights
from isthmus.convert.weight_source import PartOfWeights
from isthmus.engine.linear.fp8_quantization import ScalingName, unsupported_scaling
from isthmus.engine.linear.quantized_weight import bitsandbytes
from isthmus.engine.lora.adapter import AdapterSet
from isthmus.errors import IsthmusError, UsageError
from isthmus.families.architecture import Architecture, Dropout
from isthmus.families.family import Family
from isthmus.families.matched_tensors import (
    frozen_tensors,
    hidden_matrices,
    trained_tensors,
    untrained_tensors,
    values_by_pattern,
)
from isthmus.families.registry import family_for
from isthmus.families.rules.shard import check_tp_size
from isthmus.hf.model_folder import ModelFolder, has_class
from isthmus.hf.peft_folder import PeftFolder
from isthmus.platforms import rank_env
from isthmus.platforms.base import Platform
from isthmus.recipes.model.model_source import open_source
from isthmus.recipes.plan.layout_checks import (
    check_experts,
    check_fsdp_precision,
    check_fsdp_torch,
    check_layout,
    check_micro_batches,
    check_stages,
)
from isthmus.recipes.plan.lora_plan import existing_adapter, modules_to_save, plan_adapters, saved_tensors
from isthmus.recipes.registry import recipe_of


@dataclass(frozen=True, slots=True)
class ModelPlan:
    source: ModelFolder
    weights: OpenedHfWeights
    family: Family
    architecture: Architecture
    parallel: ParallelConfig
    world_size: int
    dropout: Dropout = field(default_factory=Dropout)
    frozen: frozenset[str] = frozenset()
    """Canonical names of the tensors that are not trained."""
    adapters: AdapterSet | None = None
    existing: PeftFolder | None = None
    """The adapter to start from."""
    teacher: ModelPlan | None = None
    """Teacher of distillation: it has the layout of the student, and no tensor that is trained."""
    least_vocab_size: int = 0
    """The embedding has at least as many rows."""

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding over all tensor-parallel ranks."""
        tp = self.parallel.tp
        return math.ceil(max(self.architecture.vocab_size, self.least_vocab_size) / tp) * tp


@dataclass(frozen=True, slots=True)
class RunModel:
    """The model of a run, before its layout is planned."""

    source: ModelFolder
    weights: OpenedHfWeights
    family: Family
    existing: PeftFolder | None = None
    """The adapter to start from."""
    teacher: RunModel | None = None


def open_run_model(config: RunConfig) -> RunModel:
    """Read config and tensor names of the model of a run, of the adapter that it starts from and of its teacher."""
    source, existing = open_source(config.model), existing_adapter(config)
    family = family_for(source.config)
    weights = _weights_of_recipe(config, open_weights(source, family), family, source, existing)
    teacher = None
    if recipe_of(config).has_teacher:
        with _naming_the_teacher(config):
            opened = open_source(teacher_config(config).model)
            its_family = family_for(opened.config)
            its_weights = _weights_of_recipe(config, open_weights(opened, its_family), its_family, opened)
            teacher = RunModel(opened, its_weights, its_family)
    return RunModel(source, weights, family, existing, teacher)


def plan_model(model: RunModel, config: RunConfig, *, world_size: int | None = None) -> ModelPlan:
    """Check the layout and decide what is trained; ``world_size`` None is that of the environment."""
    source, weights, family, existing = model.source, model.weights, model.family, model.existing
    architecture = weights.arch
    # Report sizes that do not divide the model before a wrong number of ranks.
    check_tp_size(architecture, config.parallel.tp)
    check_stages(architecture, config.parallel.pp, config.parallel.vpp)
    if world_size is None:
        world_size = rank_env.world_size()
    config.parallel.check_world_size(world_size)
    check_layout(architecture, config.parallel)
    check_experts(architecture, config.moe, fp8=config.train.fp8_experts)
    dropout = dropout_of(config.train, family.read_dropout(source.config))
    adapters = plan_adapters(config, family, architecture, existing)
    if adapters is None:
        frozen = frozen_tensors(family, architecture, config.train.freeze)
    else:
        saved = saved_tensors(family, architecture, modules_to_save(config, existing), adapters)
        frozen = frozenset(trained_tensors(family, architecture)) - saved
    frozen |= untrained_tensors(family, architecture)
    if existing is not None:
        values = MergedWeights(weights.source, family, architecture, existing, factor=0.0)
        weights = replace(weights, source=values)
    layout = config.parallel, world_size
    plan = ModelPlan(source, weights, family, architecture, *layout, dropout, frozen, adapters, existing)
    if model.teacher is None:
        return plan
    with _naming_the_teacher(config):
        return replace(plan, teacher=_plan_teacher(model.teacher, config, plan))


def teacher_config(config: RunConfig) -> RunConfig:
    """The settings that the teacher is built with; random weights are others than the student's."""
    distill = config.distill
    code = config.model.trust_remote_code
    model = ModelConfig(
        path=distill.teacher, config=distill.teacher_config, init=distill.teacher_init, trust_remote_code=code
    )
    train = config.train.model_copy(update={"seed": config.train.seed + 1})
    return config.model_copy(update={"model": model, "train": train, "moe": MoeConfig(), "lora": LoraConfig()})


@contextmanager
def _naming_the_teacher(config: RunConfig) -> Iterator[None]:
    """Errors name the settings of the teacher."""
    try:
        yield
    except IsthmusError as error:
        text = re.sub(r"\bmodel\.(config|init)\b", r"distill.teacher_\1", str(error))
        raise type(error)(f"distill.teacher={config.distill.teacher}: {text}") from error


def _plan_teacher(teacher: RunModel, config: RunConfig, student: ModelPlan) -> ModelPlan:
    """The teacher with the student's layout, without MTP layers and tokens that the student does not have."""
    source, weights, family = teacher.source, teacher.weights, teacher.family
    parallel = config.parallel
    tokens = student.architecture.vocab_size
    without_mtp = {"mtp_layers": 0, "vocab_size": min(weights.arch.vocab_size, tokens)}
    arch = weights.arch.with_settings(without_mtp)
    if arch.moe is None:
        parallel = parallel.model_copy(update={"ep": 1, "etp": None})
    check_tp_size(arch, parallel.tp)
    check_stages(arch, parallel.pp, parallel.vpp)
    check_layout(arch, parallel)
    _check_positions(config, arch)
    weights = replace(weights, source=PartOfWeights(weights.source, family, weights.arch, arch), arch=arch)
    frozen = frozenset(trained_tensors(family, arch)) | untrained_tensors(family, arch)
    return ModelPlan(
        source, weights, family, arch, parallel, student.world_size, frozen=frozen, least_vocab_size=tokens
    )


def _weights_of_recipe(
    config: RunConfig, opened: OpenedHfWeights, family: Family, source: ModelFolder, existing: PeftFolder | None = None
) -> OpenedHfWeights:
    """The weights, for recipe reward with a score head; refuses a reward model for another recipe."""
    has_head = existing is not None and existing.has_score_head
    if not recipe_of(config).trains_scores:
        if has_head:
            raise UsageError(
                f"lora.path={existing} is an adapter of a reward model, and {config.recipe} needs one of a language "
                "model. Leave it out, or use isthmus reward."
            )
        if opened.arch.head.score_head:
            raise UsageError(
                f"{source} is a reward model: it has a score head and no output layer, and {config.recipe} needs a "
                "language model. Use the model that it was trained from, or isthmus reward."
            )
        return opened
    if not has_class(family.scored_architecture):
        raise UsageError(
            f"transformers has no {family.scored_architecture}, so nothing could load a reward model of family "
            f"{family.name}. Use a model of another family."
        )
    if opened.arch.head.score_head:
        return opened
    scored = with_score_head(opened, family, config.train.seed)
    if has_head or not opened.source.tensors:
        return scored
    std = f"standard deviation {scored.arch.init_std:g}, train.seed={config.train.seed}"
    return replace(scored, notes=(*opened.notes, f"the score head is new: random, {std}"))


def dropout_of(train: TrainConfig, configured: Dropout) -> Dropout:
    """The rates of the run: those of the settings, else those of the model's config."""
    attention, hidden = train.attention_dropout, train.hidden_dropout
    if attention is not None:
        configured = replace(configured, attention=attention)
    return configured if hidden is None else replace(configured, hidden=hidden, embedding=hidden)


def dropout_messages(plan: ModelPlan) -> list[str]:
    """Lines for the log: the dropout rates, if there are any, and those that the exported config cannot have."""
    rates = {name: rate for name, rate in asdict(plan.dropout).items() if rate}
    without = ", ".join(name for name in rates if name not in plan.family.dropout)
    if not rates:
        return []
    text = "dropout: " + ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
    return [f"{text} (config.json of {plan.family.name} has no key for: {without})" if without else text]


def check_training(config: RunConfig, plan: ModelPlan) -> None:
    """All checks that need only the model and the config."""
    check_training_settings(config, plan)
    check_micro_batches(config.train, plan.parallel, plan.world_size)
    _check_recompute(config, plan)
    if config.train.precision is not None:
        check_fsdp_precision(plan.parallel, config.train.precision)
    check_fsdp_torch(plan.parallel)


def check_training_settings(config: RunConfig, plan: ModelPlan) -> None:
    """The checks of :func:`check_training` that do not depend on the layout."""
    plan.family.check_training(plan.source.config)
    _check_positions(config, plan.architecture)
    _check_selected_keys(config.data.seq_length, plan)
    _check_optimizer(config.optim, plan)
    _check_expert_bias(config, plan)
    check_best(config, has_validation=bool(config.data.valid_files or config.data.valid_fraction))
    if plan.architecture.pattern.mtp_layers and not recipe_of(config).trains_mtp:
        raise UsageError(
            f"this model has {plan.architecture.pattern.mtp_layers} MTP layers (multi-token prediction, "
            f"{plan.architecture.family}), and {config.recipe} has no loss for them. Remove them from the folder "
            "(their number in config.json, and their tensors), or fine-tune with sft."
        )


def _check_positions(config: RunConfig, architecture: Architecture) -> None:
    longest, positions = config.data.seq_length, architecture.max_position_embeddings
    if architecture.embedding.position == "learned" and longest > positions:
        raise UsageError(
            f"data.seq_length={longest} is more than the {positions} learned positions of this model "
            f"({architecture.family}). Use {positions} or less."
        )


def _check_optimizer(optim: OptimConfig, plan: ModelPlan) -> None:
    values_by_pattern(plan.family, plan.architecture, optim.lr_multipliers, "optim.lr_multipliers", frozen=plan.frozen)
    if optim.optimizer == "adamw_8bit":
        bitsandbytes("optim.optimizer=adamw_8bit")
    if optim.optimizer == "muon" and hidden_matrices(plan.family, plan.architecture).keys() <= plan.frozen:
        raise UsageError(
            "optim.optimizer=muon updates the weight matrices of the layers, and all of them are frozen in this run. "
            "Use optim.optimizer=adamw."
        )


def _check_expert_bias(config: RunConfig, plan: ModelPlan) -> None:
    """The update of the bias has no gradient, so freezing its parameter would not stop it."""
    if not config.moe.expert_bias_update_rate:
        return
    setting = f"moe.expert_bias_update_rate={config.moe.expert_bias_update_rate:g}"
    if plan.adapters is not None:
        raise UsageError(
            f"{setting} with lora: it changes the expert bias of routers, which is no part of an adapter. Leave it out."
        )
    placements = plan.family.placements(plan.architecture).items()
    biases = [name for canonical, placed in placements if canonical.endswith("expert_bias") for name in placed.hf]
    for pattern in config.train.freeze:
        if frozen := fnmatch.filter(biases, pattern):
            raise UsageError(
                f"train.freeze: {pattern} matches {frozen[0]}, and {setting} changes it. Leave one of them out."
            )


def _check_selected_keys(longest: int, plan: ModelPlan) -> None:
    """Refuse samples of ``longest`` tokens if the keys of their queries cannot be selected."""
    family, indexer = plan.architecture.family, plan.architecture.setting("indexer")
    if indexer is None or longest <= indexer.top_k:
        return
    length = f"data.seq_length={longest} is more than index_topk={indexer.top_k} ({family}), and beyond it"
    if indexer.shared_layers:
        raise UsageError(
            f"{length} layers that share the selected keys of another are not supported. Use {indexer.top_k} or less."
        )
    if plan.dropout.attention > 0:
        raise UsageError(
            f"{length} attention has no dropout. Set train.attention_dropout=0, or use {indexer.top_k} or less."
        )


def recomputable_modules(arch: Architecture) -> set[str]:
    """The names of ``train.recompute_modules`` that the model has, besides ``core_attn``."""
    feed_forward = [layer.experts is not None for layer in arch.layers]
    modules = {"moe", "moe_act"} if any(feed_forward) else set()
    modules |= set() if all(feed_forward) else {"mlp", "mlp_act"}
    if any(layer.form != "post" for layer in arch.layers):
        modules.add("layernorm")
    return modules | ({"rope"} if arch.embedding.position == "rope" and arch.latent is None else set())


def _check_recompute(config: RunConfig, plan: ModelPlan) -> None:
    train, architecture = config.train, plan.architecture
    stage_layers = math.ceil(architecture.num_layers / (plan.parallel.pp * plan.parallel.vpp))
    if train.recompute_layers is not None and train.recompute_layers > stage_layers:
        raise UsageError(
            f"train.recompute_layers={train.recompute_layers} is more than the {stage_layers} layers of a pipeline "
            f"stage. Use {stage_layers} or less, or leave it out for all."
        )
    if train.recompute != "selective":
        return
    kinds = {
        "moe": "mixtures of experts",
        "moe_act": "mixtures of experts",
        "mlp": "dense feed-forward blocks",
        "mlp_act": "dense feed-forward blocks",
        "layernorm": "norms before its blocks",
        "rope": "rotary embeddings of whole heads",
    }
    present = recomputable_modules(architecture)
    for name, what in kinds.items():
        if name in train.recompute_modules and name not in present:
            raise UsageError(
                f"train.recompute_modules names {name}, and this model has no {what} ({architecture.family}). "
                "Leave it out."
            )
    groups = architecture.attention.num_query_groups
    shared_heads = groups < plan.parallel.tp
    if "rope" in train.recompute_modules and shared_heads and architecture.attention.qk_norm:
        raise UsageError(
            f"train.recompute_modules names rope, which saves no memory with QK norm and tp={plan.parallel.tp} above "
            f"the {groups} key heads. Leave it out, or use tp={groups}."
        )


def check_precision(
    platform: Platform, precision: str, *, emulate_fp8: bool = False, fp8_scaling: ScalingName = "tensorwise"
) -> None:
    if emulate_fp8 and platform.device_type != "cpu":
        raise UsageError(f"train.emulate_fp8=true is for CPUs, and this run is on {platform.name}. Leave it out.")
    supported, reason = platform.supports(precision)
    if supported or emulate_fp8:
        missing = unsupported_scaling(fp8_scaling, platform) if precision == "fp8" else None
        if missing is not None:
            raise UsageError(
                f"train.fp8_scaling={fp8_scaling} cannot be used here: {missing}. Use tensorwise or rowwise."
            )
        return
    rehearsal = "; or try the run with a small model and emulated FP8: --rehearse" if precision == "fp8" else ""
    raise UsageError(f"train.precision={precision} cannot be used here: {reason}. Leave it out or use fp32{rehearsal}.")


def check_best(config: RunConfig, *, has_validation: bool) -> None:
    """Refuse settings that need validations without any."""
    requested = {
        "checkpoint.keep_best": config.checkpoint.keep_best,
        "train.early_stopping": config.train.early_stopping,
    }
    missing = "train.eval_every" if config.train.eval_every is None else "data.valid_files or data.valid_fraction"
    for name in (name for name, value in requested.items() if value):
        if config.train.eval_every is None or not has_validation:
            raise UsageError(f"{name} needs validations during training. Set {missing}, or leave it out.")


def check_schedule(config: RunConfig, steps: int) -> None:
    """Check that warm-up and decay fit; with ``train.epochs`` the steps are known only after loading the data."""
    warmup, decay = config.optim.warmup(steps), config.optim.decay_steps or 0
    if warmup >= steps or warmup + decay > steps:
        verb = f" and optim.decay_steps={decay} do" if decay else " does"
        raise UsageError(
            f"optim.warmup_steps={warmup}{verb} not fit in the {steps} steps that train.epochs="
            f"{config.train.epochs:g} is of this data. Lower it, or raise train.epochs."
        )


def check_profiled_steps(config: RunConfig, steps: int) -> None:
    profiled = config.train.profiled_steps
    if profiled and profiled[-1] > steps:
        raise UsageError(
            f"train.profile={config.train.profile} goes beyond the {steps} steps of this run. Name steps from 1 to "
            f"{steps}."
        )
