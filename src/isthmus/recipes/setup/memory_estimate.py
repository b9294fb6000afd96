"""What a rank of a run will hold, reckoned before anything is built; and a word when its memory cannot hold that."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from isthmus.config.schema import RunConfig
from isthmus.config.schema.parallel import ParallelConfig
from isthmus.engine.parallel.pipeline_layout import layers_of_stages
from isthmus.errors import IsthmusError, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family, Placement
from isthmus.families.rules.shard import Layout, local_shape
from isthmus.platforms.base import Platform
from isthmus.platforms.free_memory import free_bytes
from isthmus.recipes.setup.layout_checks import check_offload
from isthmus.recipes.setup.session import DTYPES, Blueprint
from isthmus.train.activation_memory import layer_bytes, stage_bytes

MARGIN = 1.25
"""What the whole estimate may exceed the memory by before a run is refused: activations are not known exactly."""
_NUMBERED = re.compile(r"decoder\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of the rank that holds most."""

    parameters: int
    """Their number, of this rank."""
    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Of all micro batches that are under way at once; by formula."""
    offloaded: int = 0
    """Optimizer state in the machine's memory, which the others do not count."""

    @property
    def held(self) -> int:
        """What it has from step to step, but for what is offloaded."""
        return self.weights + self.gradients + self.optimizer

    def __str__(self) -> str:
        parts = {
            "weights": self.weights, "gradients": self.gradients, "optimizer state": self.optimizer,
            "activations about": self.activations,
        }  # fmt: skip
        said = ", ".join(f"{name} {_gib(number)}" for name, number in parts.items())
        beside = f"; and {_gib(self.offloaded)} GiB of the machine's memory" if self.offloaded else ""
        return f"{self.parameters:,} parameters a rank, {_gib(self.held + self.activations)} GiB: {said}{beside}"


@dataclass(slots=True)
class _Share:
    """Numbers of parameters that a rank holds, by how they are kept."""

    ordinary: int = 0
    float32: int = 0
    of_experts: int = 0

    @property
    def total(self) -> int:
        return self.ordinary + self.float32 + self.of_experts


def footprint(
    family: Family, architecture: Architecture, config: RunConfig, world_size: int, precision: str
) -> Footprint:
    """Reckon it.

    Parameters are counted one by one, as the family's rules cut them. Gradients are float32; the optimizer keeps two
    float32 moments of each parameter (with ``optim.offload`` in the machine's memory) and a float32 copy where the
    model's weights have 16 bits, shared out over the ranks that hold the same. With ``parallel.fsdp`` all of it is
    float32 and shared out, and the widest layer is gathered beside the embedding and the projection.

    A sequence of dpo is a pair of answers; what its starting weights make of them is found with the same weights before
    the first step, and takes no memory beside. Activations are those of ``activation_memory``. A layer with
    experts is taken for a dense one as wide as what a token visits, with copies of the tokens for their experts; latent
    attention for attention with its widths.
    """
    parallel = config.parallel
    shares, gathered = _shares(family, architecture, parallel)
    element = DTYPES[precision].itemsize
    copies = parallel.dp(world_size) * parallel.cp
    expert_copies = max(1, world_size // (parallel.pp * parallel.expert_tp * parallel.ep))
    moments = 0 if config.optim.offload else 8
    master = moments + (4 if element < 4 else 0)
    found: list[Footprint] = []
    for rank, share in enumerate(shares):
        activations = _activations(architecture, config, world_size, element, rank)
        if parallel.fsdp:
            each = math.ceil(share.total / copies)
            weights = 4 * each + (gathered * element if copies > 1 or element < 4 else 0)
            found.append(Footprint(share.total, weights, 4 * each, 8 * each, activations))
            continue
        optimizer = math.ceil((master * share.ordinary + moments * share.float32) / copies)
        optimizer += math.ceil(master * share.of_experts / expert_copies)
        weights = element * (share.ordinary + share.of_experts) + 4 * share.float32
        offloaded = 0
        if config.optim.offload:
            offloaded = math.ceil(8 * (share.ordinary + share.float32) / copies)
            offloaded += math.ceil(8 * share.of_experts / expert_copies)
        found.append(Footprint(share.total, weights, 4 * share.total, optimizer, activations, offloaded))
    return max(found, key=lambda one: one.held + one.activations)


def check_footprint(plans: Blueprint, config: RunConfig, platform: Platform, precision: str, *, ranks_here: int) -> str:
    """Refuse a run that this machine cannot hold.

    It is refused where what is held from step to step is more than the memory of a rank, or all of it together more
    than ``MARGIN`` times that; or where the machine's memory does not hold what is offloaded to it.

    Returns:
        The estimate, for the user.

    Raises:
        UsageError: with the estimate, and what would need less.
    """
    needed = footprint(plans.family, plans.architecture, config, plans.world_size, precision)
    memory = platform.memory_for_rank_bytes(ranks_here)
    whose = "a GPU" if platform.device_type == "cuda" else "a rank's share of the memory that is free here"
    if needed.offloaded > (free := free_bytes() // ranks_here):
        raise UsageError(
            f"optim.offload=true puts {_gib(needed.offloaded)} GiB of each rank's optimizer state into the machine's "
            f"memory, and a rank's share of what is free of that is {_gib(free)} GiB. Start more ranks on more "
            "machines, or leave it out."
        )
    if needed.held <= memory and needed.held + needed.activations <= MARGIN * memory:
        return f"memory, estimated: {needed}; {whose} is {_gib(memory)} GiB"
    parallel, mends = config.parallel, []
    if needed.held > memory:
        if not parallel.fsdp and parallel.pp == 1 and parallel.ep == 1 and precision in ("fp32", "bf16"):
            mends.append("set parallel.fsdp=true over several ranks")
        if platform.device_type == "cuda" and not parallel.fsdp and not needed.offloaded:
            mends.append("set optim.offload=true")
        more = "raise parallel.tp or parallel.pp over more ranks"
        mends += ["start more ranks, over which it is cut" if parallel.fsdp else more, "use a smaller model"]
    else:
        if config.train.micro_batch_size > 1:
            mends.append("lower train.micro_batch_size")
        if config.train.recompute != "full":
            mends.append("set train.recompute=full")
        mends += ["raise parallel.cp or parallel.tp", "lower data.seq_length"]
    mend = "; or ".join(mends)
    raise UsageError(
        f"the model ({plans.architecture.family}) has {needed}. {whose[0].upper()}{whose[1:]} is {_gib(memory)} GiB. "
        f"{mend[0].upper()}{mend[1:]}."
    )


def foretell(config: RunConfig, ranks: int, *, ranks_here: int) -> str:
    """The layout and the estimate of a run that is not started, or why it would be refused."""
    from isthmus.platforms.detect import detect
    from isthmus.recipes.setup.session import blueprint, check_precision, check_training

    try:
        plans = blueprint(config, world_size=ranks)
        check_training(config, plans)
        platform = detect(config.platform)
        precision = config.train.precision or platform.default_precision()[0]
        said = [f"layout: {config.parallel.describe(plans.world_size)}"]
        needed = footprint(plans.family, plans.architecture, config, plans.world_size, precision)
        said.append(f"memory, estimated: {needed}")
        check_precision(platform, precision)
        check_offload(config.optim, config.parallel, platform.device_type)
        check_footprint(plans, config, platform, precision, ranks_here=ranks_here)
        return "\n".join([*said, "nothing has been started (DRY_RUN=1)"])
    except IsthmusError as error:
        return f"would be refused here: {error}"


def _shares(family: Family, arch: Architecture, parallel: ParallelConfig) -> tuple[list[_Share], int]:
    """Each pipeline rank's parameters, and the number that fsdp gathers at a time: a layer, and what is in none."""
    padded = math.ceil(arch.vocab_size / parallel.tp) * parallel.tp
    layout = Layout(tp_size=parallel.tp, etp_size=parallel.expert_tp, padded_vocab_size=padded)
    rank_of: list[int] = []
    for stage, layers in enumerate(layers_of_stages(arch.num_layers, parallel.pp, parallel.vpp)):
        rank_of += [stage % parallel.pp] * layers
    shares, shapes = [_Share() for _ in range(parallel.pp)], dict[int, int]()
    by_layer: dict[str, int] = {}
    for name, placement in family.placements(arch).items():
        if _is_shared(name, placement, arch, parallel):
            continue
        rule = placement.rule
        if id(rule) not in shapes:
            shapes[id(rule)] = math.prod(local_shape(rule, arch, layout))
        number, share = shapes[id(rule)], shares[_rank(name, rank_of, parallel.pp)]
        if rule.is_expert:
            share.of_experts += number
        elif name.endswith("router.weight") and arch.moe is not None and arch.moe.router_float32:
            share.float32 += number
        else:
            share.ordinary += number
        layer = _NUMBERED.match(name)
        by_layer[layer[1] if layer else ""] = by_layer.get(layer[1] if layer else "", 0) + number
    outside = by_layer.pop("", 0)
    return shares, outside + max(by_layer.values(), default=0)


def _is_shared(name: str, placement: Placement, arch: Architecture, parallel: ParallelConfig) -> bool:
    """Whether no parameter of a rank stands behind it: it is another's, a buffer, or held by another expert rank."""
    if placement.rule.alias and parallel.pp == 1:
        return True
    if name.endswith("expert_bias") or (name.startswith("mtp.") and ".transformer_layer." not in name
                                        and name.endswith(("embed_tokens.weight", "output_layer.weight"))):  # fmt: skip
        return True
    return placement.rule.is_expert and arch.moe is not None and placement.expert >= arch.moe.num_experts // parallel.ep


def _rank(name: str, rank_of: list[int], pp: int) -> int:
    layer = _NUMBERED.match(name)
    if layer is not None:
        return rank_of[int(layer[1])]
    return 0 if name.startswith("embedding.") else pp - 1


def _activations(arch: Architecture, config: RunConfig, world_size: int, element: int, rank: int) -> int:
    """Of the micro batches that a pipeline rank has under way at once."""
    train, parallel = config.train, config.parallel
    samples = 2 if config.recipe == "dpo" else 1
    longest = train.micro_batch_size * samples * config.data.seq_length
    num_tokens = next((bucket for bucket in config.data.length_buckets if bucket >= longest), longest) // parallel.cp
    micro_batches = max(1, train.global_batch_size // (train.micro_batch_size * parallel.dp(world_size)))
    chunks = layers_of_stages(arch.num_layers, parallel.pp, parallel.vpp)[rank :: parallel.pp]
    dense, extra = _as_dense(arch)
    how = {"num_tokens": num_tokens, "bytes_per_element": element, "tp": parallel.tp, "sp": parallel.sequence_parallel}
    modules = tuple(name for name in train.recompute_modules if name != "moe")
    each = 0
    for number, layers in enumerate(chunks):
        each += stage_bytes(
            dense, num_layers=layers, learned_tokens=num_tokens, first=rank == 0 and number == 0,
            last=rank == parallel.pp - 1 and number == len(chunks) - 1, recompute=train.recompute,
            recompute_modules=modules, recompute_layers=train.recompute_layers, **how,  # type: ignore[arg-type]
        )  # fmt: skip
        if train.recompute != "full":
            each += layers * extra * num_tokens * element
    # While a layer is computed again, all of it is there once more.
    again = layer_bytes(dense, **how) + extra * num_tokens * element if train.recompute == "full" else 0  # type: ignore[arg-type]
    return each * min(parallel.pp - rank, micro_batches) + again


def _as_dense(arch: Architecture) -> tuple[Architecture, int]:
    """A dense model that keeps about as much, and the channels a token keeps beside that in each layer."""
    extra = 0
    changed: dict[str, int | None] = {}
    if arch.mla is not None:
        changed |= {"mla": None, "num_query_groups": arch.num_attention_heads}
        extra += arch.mla.kv_lora_rank + (arch.mla.q_lora_rank or 0)
    if arch.moe is not None:
        visited = arch.moe.top_k * arch.moe.ffn_hidden_size + arch.moe.shared_ffn_hidden_size
        changed |= {"moe": None, "ffn_hidden_size": visited}
        extra += 2 * arch.moe.top_k * arch.hidden_size
    return (replace(arch, **changed), extra) if changed else (arch, 0)  # type: ignore[arg-type]


def _gib(number: float) -> str:
    return f"{number / 2**30:,.1f}" if number >= 2**30 / 10 else f"{number / 2**30:.3f}"
