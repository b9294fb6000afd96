"""Arguments of Megatron-LM that need a compiled extension or a GPU.

An argument that selects a kernel is replaced by the one that computes the same in PyTorch; one that changes the result
or the memory of the run is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum
from importlib.util import find_spec
from typing import Any, NamedTuple

from isthmus.errors import UsageError

TE, APEX, GPU = "TransformerEngine", "Apex", "a GPU"
_GRADIENTS, _SOFTMAX = "fused_weight_gradient_mlp_cuda of Apex", "scaled_masked_softmax_cuda of Apex"
_MODULES = {
    TE: "transformer_engine",
    APEX: "apex",
    _GRADIENTS: "fused_weight_gradient_mlp_cuda",
    _SOFTMAX: "scaled_masked_softmax_cuda",
}
Say = Callable[[str], None]


class Replaced(NamedTuple):
    name: str
    needing: tuple[Any, ...]
    """Values that need what is missing; names for an enum."""
    value: Any
    flag: str
    """The value as a flag, for the report."""
    needs: str


class Refused(NamedTuple):
    name: str
    allowed: tuple[Any, ...]
    flag: str
    needs: str
    hint: str


REPLACED = (
    Replaced("transformer_impl", ("transformer_engine",), "local", "--transformer-impl local", TE),
    Replaced("attention_backend", ("flash", "fused"), "unfused", "--attention-backend unfused", TE),
    Replaced("distributed_backend", ("nccl",), "gloo", "--distributed-backend gloo", GPU),
    Replaced("gradient_accumulation_fusion", (True,), False, "--no-gradient-accumulation-fusion", _GRADIENTS),
    Replaced("masked_softmax_fusion", (True,), False, "--no-masked-softmax-fusion", _SOFTMAX),
    Replaced("no_persist_layer_norm", (False,), True, "--no-persist-layer-norm", APEX),
    Replaced("apply_rope_fusion", (True,), False, "--no-rope-fusion", TE),
    Replaced("cross_entropy_fusion_impl", ("te",), "native", "--cross-entropy-fusion-impl native", TE),
    Replaced("tp_comm_overlap", (True,), False, "without --tp-comm-overlap", TE),
    Replaced("moe_grouped_gemm", (True,), False, "without --moe-grouped-gemm, one GEMM per expert", TE),
    Replaced("moe_permute_fusion", (True,), False, "without --moe-permute-fusion", TE),
    Replaced("moe_router_fusion", (True,), False, "without --moe-router-fusion", TE),
)
_PRECISION = "It changes the numbers: leave it out, for the precision of --bf16, --fp16 or fp32."
REFUSED = (
    Refused("fp8", (None, False), "--fp8-format", TE, _PRECISION),
    Refused("fp4", (None, False), "--fp4-format", TE, _PRECISION),
    Refused("context_parallel_size", (1,), "--context-parallel-size", TE, "Use tensor or pipeline parallelism."),
    Refused("multi_latent_attention", (False,), "--multi-latent-attention", TE, "isthmus pretrain trains such models."),
    Refused("use_precision_aware_optimizer", (False,), "--use-precision-aware-optimizer", TE, "Leave it out."),
    Refused("qk_clip", (False,), "--qk-clip", TE, "Leave it out."),
    Refused("te_rng_tracker", (False,), "--te-rng-tracker", TE, "Leave it out."),
    Refused("delay_wgrad_compute", (False,), "--delay-wgrad-compute", TE, "Leave it out."),
    Refused(
        "fine_grained_activation_offloading", (False,), "--fine-grained-activation-offloading", TE, "Leave it out."
    ),
    Refused("apply_layernorm_1p", (False,), "--apply-layernorm-1p", TE, "Models with such norms need it."),
    Refused(
        "moe_token_dispatcher_type", ("allgather", "alltoall"), "--moe-token-dispatcher-type", GPU, "Use alltoall."
    ),
    Refused("cuda_graph_impl", ("none",), "--cuda-graph-impl", GPU, "Leave it out."),
    Refused("enable_cuda_graph", (False,), "--enable-cuda-graph", GPU, "Leave it out."),
    Refused("nccl_ub", (False,), "--use-nccl-ub", GPU, "Leave it out."),
)


def missing(platform: str) -> set[str]:
    """What the arguments may need and this machine lacks; on a CPU extensions do not count."""
    cpu = platform == "cpu"
    return {needs for needs, module in _MODULES.items() if cpu or find_spec(module) is None} | ({GPU} if cpu else set())


def adapt(args: Any, lacking: Collection[str], say: Say) -> None:
    """Replace values of Megatron-LM's parsed arguments.

    Raises:
        UsageError: an argument cannot be honoured and changes the result.
    """
    for flag in REFUSED:
        value = _name(getattr(args, flag.name, flag.allowed[0]))
        if flag.needs in lacking and value not in flag.allowed:
            shown = "" if value is True else f" {value}"
            raise UsageError(f"{flag.flag}{shown} needs {flag.needs}, which is missing. {flag.hint}")
    for rule in REPLACED:
        value = getattr(args, rule.name, None)
        if rule.needs in lacking and _name(value) in rule.needing:
            setattr(args, rule.name, type(value)[rule.value] if isinstance(value, Enum) else rule.value)
            say(f"arguments: {rule.flag} ({rule.needs} is missing)")


def _name(value: Any) -> Any:
    return value.name if isinstance(value, Enum) else value
