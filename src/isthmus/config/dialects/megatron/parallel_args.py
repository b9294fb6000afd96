"""Arguments of the parallel layout."""

from __future__ import annotations

import math

from isthmus.config.dialects.megatron.arguments import Arguments, WrittenArguments
from isthmus.config.dialects.megatron.known_args import SETTINGS
from isthmus.config.dialects.translation import Translation

_SIZES = ("parallel.tp", "parallel.pp", "parallel.cp", "parallel.ep", "parallel.etp")


def put_parallel(args: Arguments, translation: Translation) -> None:
    fsdp = next((name for name in ("use_torch_fsdp2", "use_megatron_fsdp") if args.get(name)), None)
    args.put(translation, *(size for size in _SIZES if args.has(SETTINGS[size])))
    if args.get("tensor_model_parallel_size") > 1:
        # The defaults differ: on in Isthmus, off in Megatron-LM.
        args.put(translation, "parallel.sp")
    _put_virtual_stages(args, translation)
    if fsdp is not None:
        translation.put("parallel.fsdp", True, args.source(fsdp))
        if fsdp == "use_megatron_fsdp":
            why = "Isthmus uses PyTorch's FSDP2: it shards weights, gradients and optimizer state."
            translation.remark(args.source(fsdp), "different", why)
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        if args.get(name) and fsdp is not None:
            translation.remark(args.source(name), "different", "FSDP always overlaps its communication.")
        elif args.get(name):
            args.put(translation, f"parallel.{name}")
    if args.get("overlap_param_gather") and not args.get("overlap_grad_reduce") and fsdp is None:
        translation.put("parallel.overlap_grad_reduce", True, args.source("overlap_param_gather"))
    if args.has("distributed_timeout_minutes"):
        seconds = 60.0 * args.get("distributed_timeout_minutes")
        translation.put("parallel.timeout_s", seconds, args.source("distributed_timeout_minutes"))


def write_parallel(written: WrittenArguments) -> None:
    parallel = written.config.parallel
    written.put(*_SIZES, "parallel.overlap_grad_reduce", "parallel.overlap_param_gather")
    written.set("sequence_parallel", parallel.sequence_parallel, "parallel.sp")
    if parallel.vpp > 1:
        written.put("parallel.vpp")
    written.set("use_torch_fsdp2", bool(parallel.fsdp), "parallel.fsdp")
    if parallel.fsdp and parallel.fsdp is not True:
        written.remark("parallel.fsdp", "different", "Megatron-LM shards over all data-parallel ranks.")
    minutes = math.ceil(parallel.timeout_s / 60)
    written.set("distributed_timeout_minutes", minutes, "parallel.timeout_s")
    if minutes * 60 != parallel.timeout_s:
        written.remark("parallel.timeout_s", "different", f"Megatron-LM counts minutes: {minutes}.")


def _put_virtual_stages(args: Arguments, translation: Translation) -> None:
    stages, layers = args.get("pipeline_model_parallel_size"), args.get("num_layers")
    chunks, vpp = (
        args.get(f"num_{what}") for what in ("layers_per_virtual_pipeline_stage", "virtual_stages_per_pipeline_rank")
    )
    if vpp is not None:
        args.put(translation, "parallel.vpp")
    elif chunks is not None and layers is not None:
        source = args.source("num_layers_per_virtual_pipeline_stage")
        if layers % (stages * chunks):
            args.errors.append(f"{source}  does not divide the {layers} layers of {stages} stages")
        else:
            translation.put("parallel.vpp", layers // (stages * chunks), source)
