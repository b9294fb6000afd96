"""Feed-forward blocks: a dense one, and routed experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from isthmus.families.blocks.block import NO_SETTING, Block, Linear, MicroBatch, RehearsalSizes

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu", "clamped_swiglu"]
_SAVED = {
    ("silu", True): 3, ("gelu", True): 4, ("relu", True): 4, ("relu2", True): 5,
    ("silu", False): 2, ("gelu", False): 2, ("relu", False): 1, ("relu2", False): 2, ("xielu", False): 2,
}  # fmt: skip
"""[T, F] tensors saved by a feed-forward block, by activation and gating."""


@dataclass(frozen=True, kw_only=True)
class Mlp(Block):
    """A dense feed-forward block."""

    ffn_hidden_size: int
    activation: Activation = "silu"
    gated: bool = True
    mlp_bias: bool = False
    mlp_multipliers: tuple[float, float] = (1.0, 1.0)
    """Multipliers of the gate before its activation, SiLU, and of the output."""
    swiglu_limits: tuple[float | None, ...] = ()
    """Limit of each layer: ``silu(gate)`` is clamped to at most this, and the other factor to plus or minus this, in
    dense feed-forward blocks and shared experts. Empty: no limits."""
    sharing_layers_wide: bool = False
    """The feed-forward blocks of layers that share keys are twice as wide."""

    is_wide: bool = field(default=False, metadata=NO_SETTING, repr=False)
    """The block is twice as wide as those of other layers."""
    limit: float | None = field(default=None, metadata=NO_SETTING, repr=False)
    """Limit of SwiGLU in the layer."""

    def __post_init__(self) -> None:
        if not any(self.swiglu_limits):
            object.__setattr__(self, "swiglu_limits", ())

    @property
    def kind(self) -> str:
        """Kind of the layer that tensor rules select by."""
        return "wide" if self.is_wide else "dense"

    @property
    def width(self) -> int:
        return 2 * self.ffn_hidden_size if self.is_wide else self.ffn_hidden_size

    @property
    def matrices(self) -> int:
        """Matrices of a block."""
        return 3 if self.gated else 2

    def linears(self, tp: int = 1) -> list[Linear]:
        return mlp_linears(self, self.width, tp)

    def saved_tensors(self, *, fused: bool, act_recomputed: bool) -> int:
        """[T, F] tensors that the backward pass needs: output of the first projection and activation.

        Gated GELU saves another one. A squared ReLU saves the ReLU in place of its input, and a ReLU its output only.
        """
        multiplied = self.mlp_multipliers[0] != 1 or any(self.swiglu_limits)
        activation = "gelu" if self.activation in ("gelu_tanh", "clamped_swiglu") or multiplied else self.activation
        return _SAVED["silu" if fused else activation, self.gated] - act_recomputed

    def saved_bytes(self, batch: MicroBatch) -> dict[str, int]:
        if "mlp" in batch.recomputed:
            return {}
        return saved_by_width(self, batch, self.width, act_recomputed="mlp_act" in batch.recomputed)

    def buffer_elements(self, batch: MicroBatch, *, fp8: bool) -> list[int]:
        """Elements at different times of the backward pass. A CPU also has separate ones for each activation."""
        gated, eager = 2 if self.gated else 1, 0 if batch.on_gpu else 2
        width = self.ffn_hidden_size // batch.tp
        buffers = [batch.num_tokens * (gated + eager) * width + 2 * batch.outside * self.hidden_size]
        if fp8:  # a float32 weight gradient, and FP8 copies of its factors and of the weight
            buffers.append(gated * width * (5 * self.hidden_size + batch.num_tokens) // batch.bytes_per_element)
        return buffers

    def symbols(self) -> dict[str, int]:
        return {"F": self.ffn_hidden_size}

    def divided_sizes(self) -> list[tuple[str, int]]:
        return [("ffn_hidden_size", self.ffn_hidden_size)]

    def small(self, sizes: RehearsalSizes) -> Mlp:
        return replace(self, ffn_hidden_size=sizes.ffn_hidden_size)


def mlp_linears(mlp: Mlp, width: float, tp: int) -> list[Linear]:
    """The linear layers of a feed-forward block of another ``width``."""
    hidden = mlp.hidden_size
    return [Linear((2 if mlp.gated else 1) * width / tp, hidden, "column"), Linear(hidden, width / tp, "row")]


def saved_by_width(mlp: Mlp, batch: MicroBatch, width: int, *, act_recomputed: bool) -> dict[str, int]:
    """Activation bytes of a feed-forward block of another ``width``."""
    tensors = mlp.saved_tensors(fused=batch.on_gpu, act_recomputed=act_recomputed)
    size = batch.num_tokens * tensors * width // batch.tp * batch.bytes_per_element
    return {f"{tensors} T F of the feed-forward block": size}


@dataclass(frozen=True, kw_only=True)
class Experts(Block):
    """Mixture-of-experts blocks and their router."""

    prefix: ClassVar[str] = "moe"
    kind: ClassVar[str] = "moe"

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    """Width of one expert."""
    latent_size: int | None = None
    """Width of the inputs and outputs of routed experts, between two projections; None: the hidden size."""
    shared_ffn_hidden_size: int = 0
    """Total width of the shared experts; 0: none."""
    shared_mean: bool = False
    """With shared experts, the output is half the sum of routed and shared experts."""
    shared_gate: bool = False
    """Multiplies the output of the shared experts by a sigmoid gate."""
    dense_layers: tuple[int, ...] = ()
    """Layers, counted from 0, with a dense feed-forward block."""
    score: Literal["softmax", "sigmoid", "softmax_of_chosen", "sparsemixer"] = "softmax"
    """Score function; ``softmax_of_chosen`` is applied after top-k selection, to the selected logits only.
    ``sparsemixer`` (arXiv 2409.12136) selects one expert after another, each with its probability among those left
    whose logits are within ``score_tolerance`` of the best, relative to the larger one; for inference only."""
    score_tolerance: float = 0.0
    normalize: bool = False
    """The weights of the selected experts are divided by their sum."""
    normalize_min: float = 1e-20
    """Lower bound of the divisor."""
    normalize_offset: float = 0.0
    """Added to the divisor."""
    scaling_factor: float = 1.0
    """Multiplier of the final weights."""
    expert_bias: bool = False
    """A float32 bias that affects the selection of experts but not their weights (arXiv 2408.15664)."""
    num_groups: int = 1
    group_top_k: int = 1
    """Experts are selected from the best ``group_top_k`` of ``num_groups`` groups."""
    group_score: Literal["max", "top2"] = "top2"
    """Score of a group: its best expert, or the sum of its two best."""
    router_bias: bool = False
    router_float32: bool = False
    """The router's weights are always float32."""
    router_norm: bool = False
    """The router's input is divided by its root mean square and multiplied by learned gains, and the logits are divided
    by the root of its width."""
    expert_gains: bool = False
    """The final weight of each expert is multiplied by a learned number."""
    branch_norms: bool = False
    """Routed and shared experts have norms of their own, before and after them; the router has the input before these.
    """
    swiglu_limits: tuple[float | None, ...] = ()
    """Limits of routed experts, as :attr:`Mlp.swiglu_limits`."""
    weighs_inputs: bool = False
    """The weight of an expert multiplies its input and not its output."""
    expert_mlp_bias: bool = False
    output_bias: bool = False
    """A bias that is added to the weighted sum of the experts' outputs."""

    mlp: Mlp | None = field(default=None, metadata=NO_SETTING, repr=False)
    """Activation, and limits of shared experts, of the layer."""
    limit: float | None = field(default=None, metadata=NO_SETTING, repr=False)
    """Limit of SwiGLU of routed experts in the layer."""

    def __post_init__(self) -> None:
        if not any(self.swiglu_limits):
            object.__setattr__(self, "swiglu_limits", ())

    @property
    def in_layer(self) -> Mlp:
        """The dense block whose activation the experts have."""
        if self.mlp is None:
            raise ValueError("these experts are a model's settings, and not those of a layer")
        return self.mlp

    @property
    def input_size(self) -> int:
        """Width of the inputs and outputs of routed experts."""
        return self.latent_size or self.hidden_size

    def invalid_reason(self) -> str | None:
        if self.branch_norms and not self.shared_ffn_hidden_size:
            return "experts with norms of their own need shared experts beside them"
        if self.weighs_inputs and self.expert_mlp_bias:
            return "experts with weighted inputs cannot have biases"
        if self.num_experts % self.num_groups:
            return f"{self.num_groups} groups do not divide {self.num_experts} experts"
        in_group = self.num_experts // self.num_groups
        if self.group_top_k > self.num_groups:
            return f"group_top_k={self.group_top_k} is more than the {self.num_groups} groups"
        if self.num_groups > 1 and self.group_score == "top2" and in_group < 2:
            return f"groups of {in_group} experts have no two best experts"
        if self.top_k > self.group_top_k * in_group:
            return f"top_k={self.top_k} is more than the {self.group_top_k * in_group} experts to select from"
        return None

    def linears(self, tp: int = 1) -> list[Linear]:
        """Linear layers of every token, without routed experts."""
        return self.router_linears() + self.shared_linears(tp)

    def router_linears(self) -> list[Linear]:
        """Router, latent projections, and the gate of shared experts: whole on each rank, for its own tokens."""
        hidden = self.hidden_size
        linears = [Linear(self.num_experts, hidden, fp8=False)]
        if self.latent_size is not None:
            linears += [Linear(self.latent_size, hidden, fp8=False), Linear(hidden, self.latent_size, fp8=False)]
        return linears + ([Linear(1, hidden, fp8=False)] if self.shared_gate else [])

    def shared_linears(self, tp: int = 1) -> list[Linear]:
        return mlp_linears(self.in_layer, self.shared_ffn_hidden_size, tp) if self.shared_ffn_hidden_size else []

    @property
    def expert_weights(self) -> int:
        """Weights of the matrices of one routed expert."""
        return self.in_layer.matrices * self.ffn_hidden_size * self.input_size

    @property
    def matmul_weights(self) -> int:
        """Weights in a token's matmuls: of routed experts, its ``top_k``."""
        return super().matmul_weights + self.top_k * self.expert_weights

    def rows(self, batch: MicroBatch) -> int:
        """Tokens that are routed to the experts of a rank, at a uniform load."""
        return batch.outside * self.top_k * (batch.etp if batch.sp else 1)

    def saved_bytes(self, batch: MicroBatch) -> dict[str, int]:
        """A dense block as wide as a token's experts, plus the routed rows at a uniform load, and the router."""
        if "moe" in batch.recomputed:
            return {}
        act_recomputed = "moe_act" in batch.recomputed
        width = self.top_k * self.ffn_hidden_size + self.shared_ffn_hidden_size
        terms = saved_by_width(self.in_layer, batch, width, act_recomputed=act_recomputed)
        rows, element, hidden = self.rows(batch), batch.bytes_per_element, self.hidden_size
        # On a CPU also the activations before they are weighted.
        weighted = 0 if act_recomputed or batch.on_gpu else self.ffn_hidden_size // batch.etp
        terms["rows of the experts"] = rows * (hidden + weighted) * element
        router = 8 * batch.outside * self.num_experts
        if element < 4 and self.router_norm:  # in float32; only shared experts need its input in 16 bits
            router += batch.outside * hidden * (4 if self.shared_ffn_hidden_size else 4 - element)
        router += 4 * batch.outside * hidden if self.router_norm else 0
        terms["router"] = router
        if self.branch_norms:  # inputs of the norms after routed and shared experts, and numbers of all four
            terms["norms of the experts"] = batch.outside * (2 * hidden * element + 16)
        return terms

    def buffer_elements(self, batch: MicroBatch, *, fp8: bool) -> list[int]:
        """Elements at different times of the backward pass."""
        gated, eager, hidden = 2 if self.in_layer.gated else 1, 0 if batch.on_gpu else 2, self.hidden_size
        experts, width, rows = self.num_experts // batch.ep, self.ffn_hidden_size // batch.etp, self.rows(batch)
        return [
            4 * rows * hidden,  # rows and gradients on both sides of an exchange
            experts * gated * width * hidden + rows * ((gated + eager) * width + hidden),
        ]

    def symbols(self) -> dict[str, int]:
        return {
            "E": self.num_experts,
            "X": self.ffn_hidden_size,
            "S": self.shared_ffn_hidden_size,
            "Hx": self.input_size,
        }

    def divided_sizes(self) -> Sequence[tuple[str, int]]:
        return [("shared_ffn_hidden_size", self.shared_ffn_hidden_size)]

    def small(self, sizes: RehearsalSizes) -> Experts:
        multiple = math.lcm(sizes.ep, self.num_groups)
        experts = math.ceil(max(2 * self.top_k, 2 * self.num_groups) / multiple) * multiple
        width = sizes.expert_size or 32 * math.lcm(sizes.tp, sizes.etp)
        shared_widths = max(1, self.shared_ffn_hidden_size // self.ffn_hidden_size)
        return replace(
            self,
            num_experts=min(experts, self.num_experts),
            ffn_hidden_size=width,
            shared_ffn_hidden_size=width * shared_widths if self.shared_ffn_hidden_size else 0,
            latent_size=self.latent_size and 2 * sizes.least,
        )
