"""The adapter folder of a run, which PEFT loads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from isthmus.config.schema import RunConfig
from isthmus.convert.towers import Towers
from isthmus.engine.lora.adapter import Adapter, Role
from isthmus.engine.lora.attach import adapter_tensors
from isthmus.engine.lora.low_rank import AdapterTensor
from isthmus.engine.parallel.ddp import gather_weights
from isthmus.engine.parallel.process_groups import Position, agree, barrier, sum_bytes
from isthmus.families.adapted_linears import all_linears, module_path
from isthmus.families.matched_tensors import trained_tensors
from isthmus.hf.peft_folder import AdapterConfig, LoraFactors, write_adapter
from isthmus.hf.staged_folder import StagedFolder
from isthmus.recipes.model.hf_export import iterate_full_weights
from isthmus.recipes.model.pissa import doubled
from isthmus.recipes.model.rank_model import RankModel
from isthmus.recipes.plan.lora_plan import modules_to_save
from isthmus.recipes.plan.model_plan import ModelPlan


def export_adapter(model: RankModel, config: RunConfig, destination: Path) -> None:
    """Write ``destination``, replacing an earlier one; a collective. Rank 0 has all adapters in memory, no weights."""
    plan = model.plan
    gather_weights(model.stages)
    factors = {
        adapter.linear: LoraFactors(
            tensors["lora_A"], tensors["lora_B"], adapter.scale, tensors.get("lora_magnitude_vector")
        )
        for adapter, tensors in _full_adapters(model)
    }
    settings = _settings(config, plan)
    if (pissa := model.pissa) is not None:  # it was subtracted from the weights
        factors = {linear: pissa.relative_to_original(linear, values) for linear, values in factors.items()}
        settings = doubled(settings)
    trained = trained_tensors(plan.family, plan.architecture).keys() - plan.frozen
    saved = {
        module_path(plan.family, name) + (".weight" if name.endswith(".weight") else ""): tensor.cpu()
        for name, tensor in iterate_full_weights(model, dtype=model.dtype, rank0_only=True, only=trained)
    }

    def write() -> None:
        if model.position.rank == 0:
            linears = [
                linear
                for weight_linears in all_linears(plan.family, plan.architecture).values()
                for linear in weight_linears
            ]
            towers = [name.rpartition(".")[0] for name in Towers(plan.weights.source, plan.family).tensors]
            with StagedFolder(destination, replace=True) as staged:
                write_adapter(staged.path, settings, factors, linears, saved, towers)

    agree(write)
    barrier()


def _settings(config: RunConfig, plan: ModelPlan) -> AdapterConfig:
    """Settings of the adapter's file; its writer adds the targets."""
    lora, modules = config.lora, modules_to_save(config, plan.existing)
    task = "SEQ_CLS" if plan.architecture.head.score_head else "CAUSAL_LM"
    if plan.existing is not None:
        return replace(plan.existing.config, lora_dropout=lora.dropout, modules_to_save=modules, task_type=task)
    assert lora.rank is not None
    return AdapterConfig(
        r=lora.rank,
        lora_alpha=lora.alpha_of(lora.rank),
        lora_dropout=lora.dropout,
        use_dora=lora.dora,
        use_rslora=lora.rslora,
        modules_to_save=modules,
        task_type=task,
        base_model_name_or_path=config.model.path,
    )


def _full_adapters(model: RankModel) -> Iterator[tuple[Adapter, dict[Role, Tensor]]]:
    """The whole tensors of each adapter, on the host of rank 0; a collective."""
    adapters = model.plan.adapters
    assert adapters is not None
    local_tensors = {(tensor.adapter.linear, tensor.role): tensor for tensor in adapter_tensors(model.stages)}
    device = next(model.stages[0].parameters()).device
    for adapter in (adapter for weight_adapters in adapters.by_weight.values() for adapter in weight_adapters):
        tensors: dict[Role, Tensor] = {}
        for role in adapters.roles:
            full = torch.zeros(adapter.shape(role), dtype=model.dtype, device=device)
            part = local_tensors.get((adapter.linear, role))
            if part is not None and _is_written_by(model.position, part):
                for index, local in part.pieces:
                    full[index] = part.parameter.detach()[local]
            if sum_bytes([full], rank0_only=True):
                tensors[role] = full.cpu()
        if tensors:
            yield adapter, tensors


def _is_written_by(position: Position, part: AdapterTensor) -> bool:
    """Whether this rank is the first one with the part."""
    if getattr(part.parameter, "allreduce", True):
        return not (position.dp_rank or position.cp_rank or (part.replicated and position.tp_rank))
    return not (position.edp_rank or (part.replicated and position.etp_rank))
