"""Export of a trained model to a Hugging Face folder, and the model files in a checkpoint."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from isthmus.convert.gathered_weights import full_weights
from isthmus.convert.hf.hf_weights import config_dtype
from isthmus.convert.legacy.megatron_args import megatron_args
from isthmus.convert.online import export_plan, export_weights, read_tensor
from isthmus.convert.open_model import HF_SUBFOLDER
from isthmus.convert.towers import Towers
from isthmus.convert.weight_source import copied_dtype
from isthmus.engine.linear.quantized_weight import QuantizedWeight
from isthmus.engine.lora.attach import Merge
from isthmus.engine.parallel.ddp import gather_weights
from isthmus.engine.parallel.live_parameters import live_tensors, mtp_shared_tensors
from isthmus.engine.parallel.process_groups import agree, barrier, gather_objects
from isthmus.engine.tensor_names import expert_of
from isthmus.errors import disk_errors
from isthmus.files.file_checksums import Parts, WrittenBlocks, hash_share, merge_parts
from isthmus.hf.model_folder import write_model_files
from isthmus.hf.staged_folder import StagedFolder
from isthmus.hf.tensors.parallel_writer import SafetensorsWriter
from isthmus.hf.tokenizer.tokenizer import Tokenizer, save_tokenizer
from isthmus.recipes.model.model_source import answer_end, with_tokens_of
from isthmus.recipes.model.rank_model import RankModel
from isthmus.recipes.plan.model_plan import ModelPlan


def export_hf(
    model: RankModel,
    destination: Path,
    tokenizer: Tokenizer | None,
    *,
    dtype: torch.dtype | None,
    replace: bool,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write a Hugging Face model folder; a collective. Each rank writes its own slices, no rank gathers the model.

    ``dtype`` None keeps each tensor's dtype in the source, or the config's dtype without weights. ``tokenizer`` None
    copies the files of the source. If a rank cannot write, or ``check``, called before each tensor, raises on any rank,
    all ranks raise and nothing is published.
    """
    plan, main = model.plan, model.position.rank == 0
    towers = Towers(plan.weights.source, plan.family)
    files = export_plan(plan.family, plan.architecture, _dtypes(plan, dtype), towers=towers.tensors)
    staged, written = StagedFolder(destination, replace=replace), WrittenBlocks()

    def begin() -> None:
        if main:
            staged.create()
            files.create(staged.path)

    gather_weights(model.stages)

    def write() -> None:
        tensors, writes = _tensors_to_write(model)
        arguments = (tensors, plan.family, plan.architecture, files, staged.path)
        merge = _merge(model)

        def checked(name: str, weight: torch.Tensor) -> torch.Tensor:
            check()
            return merge(name, weight)

        export_weights(*arguments, layout=model.layout, writes=writes, merge=checked, written=written)
        if local_names := [*towers.tensors][model.position.rank :: plan.world_size]:
            with SafetensorsWriter(files, staged.path, written) as writer:
                towers.copy(writer, local_names, lambda done, total: check())

    def finish() -> None:
        if main:
            with disk_errors(staged.path):
                _write_model_files(plan, staged.path, tokenizer, dtype)
            staged.publish()

    try:
        for stage in (begin, write):
            agree(stage)
        staged.parts = checksums_of_ranks(staged.path, written)
        agree(finish)
    except BaseException:
        if main:
            staged.discard()
        raise
    barrier()


def checksums_of_ranks(folder: Path, written: WrittenBlocks) -> list[Parts]:
    """The checksums of files that several ranks wrote; a collective. Blocks of slices of several ranks are read."""
    known = merge_parts(gather_objects(written.parts()))
    shares: list[Parts] = []
    rank, world_size = dist.get_rank(), dist.get_world_size()
    agree(lambda: shares.append(hash_share(folder, known, rank, world_size)))
    return [known, *gather_objects(shares[0])]


def iterate_full_weights(
    model: RankModel, *, dtype: torch.dtype | None, rank0_only: bool, only: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what :func:`export_hf` writes except towers, see :func:`full_weights`."""
    plan = model.plan
    gather_weights(model.stages)
    yield from full_weights(
        _tensors(model),
        plan.family,
        plan.architecture,
        _dtypes(plan, dtype),
        layout=model.layout,
        device=next(model.stages[0].parameters()).device,
        rank0_only=rank0_only,
        merge=_merge(model),
        only=only,
    )


def _dtypes(plan: ModelPlan, dtype: torch.dtype | None) -> torch.dtype | dict[str, torch.dtype]:
    stored = {name: info.dtype for name, info in plan.weights.source.tensors.items()}
    if dtype is None or not stored:
        return dtype or stored or config_dtype(plan.source.config, torch.float32)
    placements = plan.family.placements(plan.architecture).values()
    rules = {name: placed.rule for placed in placements for name in placed.hf}
    names = plan.family.hf_shapes(plan.architecture)
    targets = {name: stored.get(name, dtype) for name in names}
    return {name: copied_dtype(rules[name], partial(targets.__getitem__, name), dtype) for name in names}


def _merge(model: RankModel) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Merges adapters into the weights; the weights of a quantized base are read again."""
    plan, merge = model.plan, Merge(model.stages)
    placements = plan.family.placements(plan.architecture)

    def merged(name: str, weight: torch.Tensor) -> torch.Tensor:
        if not isinstance(weight, QuantizedWeight):
            return merge(name, weight)
        original = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        read_tensor(placements[name], original, plan.architecture, model.source, layout=model.layout)
        return merge(name, original)

    return merged


def _tensors(model: RankModel) -> dict[str, torch.Tensor]:
    """The tensors for the export, each on one stage."""
    tensors, mtp_copies = live_tensors(model.stages), mtp_shared_tensors(model.stages)
    if mtp_copies and not model.position.is_first_stage:
        del tensors["embedding.word_embeddings.weight"]  # the first stage has it
    placements = model.plan.family.placements(model.plan.architecture)
    # Not all files have them.
    return tensors | {name: tensor for name, tensor in mtp_copies.items() if name in placements}


def _tensors_to_write(model: RankModel) -> tuple[dict[str, torch.Tensor], bool]:
    """The tensors for the export, and whether this rank writes them (with fsdp some ranks only gather)."""
    position, tensors = model.position, _tensors(model)
    first_replica = position.dp_rank == position.cp_rank == 0
    if model.plan.parallel.fsdp:
        return tensors, first_replica
    first_expert_replica = position.edp_rank == 0
    live = {
        name: tensor
        for name, tensor in tensors.items()
        if (first_replica if expert_of(name) is None else first_expert_replica)
    }
    return live, True


def write_checkpoint_config(model: RankModel, checkpoint: Path, tokenizer: Tokenizer) -> None:
    """Write config, tokenizer and towers into a checkpoint, so that it converts without the model folder.

    A checkpoint of adapters is not converted, and has no towers.
    """
    plan, folder = model.plan, checkpoint / HF_SUBFOLDER
    folder.mkdir()
    _write_model_files(plan, folder, tokenizer, model.dtype)
    if plan.family.nested is not None and plan.adapters is None:
        Towers(plan.weights.source, plan.family).store(folder)


def checkpoint_args(model: RankModel, step: int) -> Namespace:
    """The Megatron-LM arguments of a checkpoint."""
    padded = model.layout.padded_vocab_size
    args = megatron_args(model.plan.architecture, model.dtype, padded_vocab_size=padded, dropout=model.plan.dropout)
    args.iteration = step
    return args


def _write_model_files(plan: ModelPlan, folder: Path, tokenizer: Tokenizer | None, dtype: torch.dtype | None) -> None:
    dtype_name = str(dtype).removeprefix("torch.") if dtype else None
    config = plan.family.to_hf_config(plan.architecture, plan.source.config, dtype=dtype_name, dropout=plan.dropout)
    if plan.architecture.head.score_head and tokenizer is not None:
        config["pad_token_id"] = answer_end(plan.source.config, tokenizer).padding
    if tokenizer is None or (tokenizer.folder == plan.source.path and tokenizer.turn_end_id is None):
        write_model_files(folder, plan.source, config)
    else:
        write_model_files(folder, plan.source, with_tokens_of(tokenizer, config), tokenizer.files)
    if tokenizer is not None and tokenizer.differs_from_files:
        save_tokenizer(tokenizer.inner, folder)
