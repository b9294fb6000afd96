"""A layer of the decoder: its mixers, its feed-forward block, and where its norms are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from isthmus.families.blocks.attention import Attention
from isthmus.families.blocks.block import Linear, MicroBatch, Mixer
from isthmus.families.blocks.feed_forward import Experts, Mlp
from isthmus.families.blocks.norm import Norm

Form = Literal["pre", "post", "sandwich", "parallel", "parallel_two_norms"]
"""Placement of the norms in a layer; ``f`` is attention or the feed-forward block:

``pre``: x + f(norm(x)); ``post``: x + norm(f(x)); ``sandwich``: x + norm(f(norm(x)));
``parallel``: x + attention(norm(x)) + mlp(norm(x)) with one norm, ``parallel_two_norms`` with one for each.
"""
_NORMS = {
    "pre": (4, 2, 2),
    "post": (4, 2, 0),
    "sandwich": (6, 4, 2),
    "parallel": (2, 1, 1),
    "parallel_two_norms": (3, 2, 2),
}
"""Counts by form: [T, H] tensors that norms and projections after them save; norms; outputs of norms among the
tensors."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Equal layers compute the same; ``number``, counted from 0, is not compared. MTP layers follow the last layer."""

    number: int = field(compare=False)
    hidden_size: int
    form: Form
    norm: Norm
    mixers: tuple[Mixer, ...]
    """Their outputs are added. Empty: the layer is a feed-forward block."""
    feed_forward: Mlp | Experts | None
    input_size: int = 0
    """Width of the layer's own input of each token; 0: none."""
    is_mtp: bool = False
    """The layer predicts a further token, from a projection of a hidden state and an embedding."""

    @property
    def attention(self) -> Attention | None:
        return next((mixer for mixer in self.mixers if isinstance(mixer, Attention)), None)

    @property
    def experts(self) -> Experts | None:
        return self.feed_forward if isinstance(self.feed_forward, Experts) else None

    @property
    def mixer_kinds(self) -> tuple[str, ...]:
        return tuple(mixer.kind for mixer in self.mixers)

    @property
    def kinds(self) -> frozenset[str]:
        """What tensor rules select layers by.

        Mixers, ``moe``, ``dense`` or ``wide``, ``windowed`` or ``full`` attention, with ``_queries`` if it shares keys,
        and ``indexed`` if it has an indexer.
        """
        kinds = {kind for mixer in self.mixers for kind in mixer.rule_kinds}
        return frozenset(kinds if self.feed_forward is None else kinds | {self.feed_forward.kind})

    @property
    def description(self) -> str:
        """Such as ``moe, windowed, mamba2``."""
        block = "no mlp" if self.feed_forward is None else "moe" if self.experts else "dense"
        attention = self.attention
        features = {
            "windowed": attention is not None and attention.window is not None,
            "unrotated": attention is not None and attention.rotary is None,
            "queries": attention is not None and attention.key_source is not None,
            "twice the width": isinstance(self.feed_forward, Mlp) and self.feed_forward.is_wide,
        }
        mixers = [] if self.mixer_kinds == ("attention",) else self.mixer_kinds or ["no mixer"]
        names = [name for name, has in features.items() if has]
        return ", ".join([*(["MTP"] if self.is_mtp else []), block, *names, *mixers])

    @property
    def num_norms(self) -> int:
        """Norms of hidden states."""
        norms = _NORMS[self.form][1]
        return norms if self.mixers and self.feed_forward is not None else norms // 2

    def input_linears(self) -> list[Linear]:
        """The layer's part of the projection of embeddings, its gate, and the projection of the gated input."""
        width, hidden = self.input_size, self.hidden_size
        return [Linear(width, hidden, fp8=False)] * 2 + [Linear(hidden, width, fp8=False)] if width else []

    @property
    def matmul_weights(self) -> int:
        """Weights in a token's matmuls and convolutions, without norms and biases; of routed experts, a token's."""
        blocks = [*self.mixers, *([] if self.feed_forward is None else [self.feed_forward])]
        inputs = sum(linear.weights for linear in self.input_linears()) + (
            2 * self.hidden_size**2 if self.is_mtp else 0
        )
        return round(inputs) + sum(block.matmul_weights for block in blocks)

    def saved_bytes(self, batch: MicroBatch) -> dict[str, int]:
        """Activation bytes that the layer keeps for the backward pass, by part (as in arXiv 2205.05198, section 4).

        Norms and the projections after them are divided by tp only with sequence parallelism: a norm saves its input
        and a float32 number per token (LayerNorm: two), the projection its input; 4 T H for ``pre``. Recomputing
        ``layernorm`` keeps no input of a projection after a norm, ``mlp_act`` no activation, ``rope`` no rotated
        queries and keys, ``mlp`` only the input of the block.

        Measured on a CPU without CP and MTP layers. GPU attention kernels also save one number per head, and ``sdpa`` a
        second copy of its output.
        """
        tensors = self._norm_tensors("layernorm" in batch.recomputed)
        outside, element = batch.outside, batch.bytes_per_element
        terms = {
            f"{tensors} T H of norms and the inputs of projections": outside * tensors * self.hidden_size * element,
            "float32 statistics of norms": 4 * outside * self.num_norms * self.norm.statistics,
        }
        for mixer in self.mixers:
            terms |= mixer.saved_bytes(batch)
        if self.feed_forward is not None:
            terms |= self.feed_forward.saved_bytes(batch)
        if width := self.input_size:
            input_elements = 2 * self.hidden_size + 4 * width
            terms["the layer's own input and its gate"] = outside * (input_elements * element + 4)
        if self.is_mtp:
            terms["6 T H of joined embeddings"] = 6 * outside * self.hidden_size * element
        return terms

    def _norm_tensors(self, recomputed: bool) -> int:
        tensors, _, outputs = _NORMS[self.form]
        tensors -= outputs if recomputed else 0
        if not (self.mixers and self.feed_forward is not None):  # the layer is one block
            tensors //= 2
        multiplied = any(mixer.input_and_output_multipliers[0] != 1 for mixer in self.mixers)
        return tensors + (len(self.mixers) > 1 and multiplied)

    def buffer_elements(self, batch: MicroBatch, *, fp8: bool) -> int:
        """Upper bound of the temporary elements in the backward pass."""
        buffers = [batch.num_tokens * 2 * self.hidden_size]  # the gathered input of a block and its gradient
        buffers += [mixer.buffer_elements(batch) for mixer in self.mixers]
        if self.feed_forward is not None:
            buffers += self.feed_forward.buffer_elements(batch, fp8=fp8)
        return max(buffers)
