"""Fused output projection and cross entropy or distillation loss: vocabulary-parallel and chunked.

Logits exist for one chunk of tokens at a time. For the summed loss the forward pass computes the gradients and the
backward pass scales them. For per-token losses the backward pass recomputes the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.config.schema.distillation import DistillConfig
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.layers.dropout import hashed
from isthmus.engine.linear.matmul import add_matmul, matmul
from isthmus.engine.loss import cross_entropy_cpu, cross_entropy_gpu, distillation_loss
from isthmus.engine.loss.cross_entropy_cpu import Smoothing
from isthmus.engine.parallel.context_parallel import local_tokens


@dataclass(frozen=True, slots=True)
class TokenSampling:
    """Draws tokens from the softmax of logits."""

    temperature: float
    keys: Tensor
    """int64 [n], a random key of each position, so that all layouts draw the same tokens."""
    top_p: float = 1.0
    """Only of the most probable tokens that have this probability together (arXiv 1904.09751)."""

    def __getitem__(self, rows: slice) -> TokenSampling:
        return TokenSampling(self.temperature, self.keys[rows], self.top_p)

    def uniform(self) -> Tensor:
        """Float64 [n] in [0, 1), hashes of the keys."""
        return (hashed(self.keys) >> 11 & (1 << 53) - 1).double() * 2.0**-53


def sampling_at(positions: Tensor, batch: PackedBatch) -> TokenSampling | None:
    """For int64 [n] positions of this rank's tokens; None for the most probable tokens."""
    if batch.sampling is None:
        return None
    keys = local_tokens(batch.sampling.tokens, batch.spans).to(positions.device)
    return TokenSampling(batch.sampling.temperature, keys[positions], batch.sampling.top_p)


def device_code(hidden: Tensor) -> ModuleType:
    return cross_entropy_cpu if hidden.device.type == "cpu" else cross_entropy_gpu


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients of a loss, computed chunk by chunk in the memory of the logits."""

    scale: Tensor | None
    """Gradient of the losses: a scalar or [n, 1]; None means one."""
    hidden: Tensor
    """[n, H], overwritten."""
    weight: Tensor | None
    """[V / tp, H], added to; None for a frozen weight."""
    bias: Tensor | None
    """[V / tp], added to; None for a frozen bias, or without one."""

    def scale_of(self, tokens: slice) -> Tensor | None:
        return self.scale if self.scale is None or self.scale.dim() == 0 else self.scale[tokens]

    def add(self, tokens: slice, grad_logits: Tensor, hidden: Tensor, rows: Tensor) -> None:
        """Add those of a chunk from the gradients of its logits [m, rows]; ``rows`` are those of the weight."""
        matmul(grad_logits, rows, out=self.hidden[tokens])
        if self.weight is not None:
            add_matmul(self.weight[: rows.size(0)], grad_logits.t(), hidden[tokens])
        if self.bias is not None:
            self.bias[: rows.size(0)] += grad_logits.sum(0, dtype=self.bias.dtype)


@dataclass(frozen=True, slots=True)
class VocabShard:
    start: int = 0
    """Vocabulary index of this rank's first row."""
    rows: int | None = None
    """Rows of the weight without padding; None means all."""
    group: dist.ProcessGroup | None = None
    """The tensor-parallel group, None for one rank."""
    softcap: float | None = None
    """Logits l become softcap * tanh(l / softcap)."""
    smoothing: Smoothing | None = None
    bias: Tensor | None = None
    """Bias of the logits, [V / tp]."""
    temperature: float = 1.0
    """Divisor of the capped logits in :mod:`isthmus.engine.loss.policy_values`."""

    def chunk_losses(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, gradients: Gradients | None = None
    ) -> Iterator[Tensor]:
        """Yield the cross entropies of each chunk of tokens, float32 [m]."""
        device = device_code(hidden)
        for tokens, logits in self.chunk_logits(hidden, weight, device.chunk_elements(hidden.device)):
            scale = None if gradients is None else gradients.scale_of(tokens)
            arguments = (labels[tokens] - self.start, self.group, scale, self.softcap)
            yield device.chunk_losses(logits, *arguments, gradient=gradients is not None, smoothing=self.smoothing)
            if gradients is not None:
                gradients.add(tokens, logits, hidden, weight[: self.rows])

    def distillation_losses(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        teacher: TeacherOutput,
        gradients: Gradients | None = None,
    ) -> Iterator[Tensor]:
        """Yield the losses of distillation of each chunk of tokens, float32 [m, 3]."""
        elements = device_code(hidden).chunk_elements(hidden.device)
        if hidden.is_cuda:
            elements //= distillation_loss.CHUNK_SHARE
        teacher_buffer: Tensor | None = None
        for tokens, logits in self.chunk_logits(hidden, weight, elements):
            if teacher_buffer is None:  # the first chunk is the longest
                teacher_buffer = cross_entropy_gpu.new_buffer(*logits.shape, like=teacher.hidden)
            scale = None if gradients is None else gradients.scale_of(tokens)
            teacher_logits = teacher.logits(tokens, out=teacher_buffer[: len(logits)])
            arguments = (labels[tokens] - self.start, self.group, scale, self.softcap)
            yield distillation_loss.chunk_losses(
                logits, teacher_logits, *arguments, teacher.settings, gradient=gradients is not None
            )
            if gradients is not None:
                gradients.add(tokens, logits, hidden, weight[: self.rows])

    def scores(
        self, hidden: Tensor, weight: Tensor, labels: Tensor | None, sampling: TokenSampling | None
    ) -> tuple[Tensor, Tensor]:
        """Cross entropies, float32 [n], and the most probable tokens or random ones, int64 [n].

        Without ``labels`` the cross entropies are those of the chosen tokens. With ``sampling`` they are at its
        temperature, of the distribution over the whole vocabulary, also with ``top_p``.
        """
        device, chosen = device_code(hidden), torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        labels = chosen if labels is None else labels
        losses = [hidden.new_empty(0, dtype=torch.float32)]
        shard = self if sampling is None else replace(self, temperature=sampling.temperature)
        for tokens, logits in self.chunk_logits(hidden, weight, device.chunk_elements(hidden.device)):
            chosen[tokens] = self._choose(logits, None if sampling is None else sampling[tokens], weight.size(0))
            arguments = (labels[tokens] - self.start, self.group, None, shard.apply_temperature(logits))
            losses.append(device.chunk_losses(logits, *arguments, gradient=False, smoothing=self.smoothing))
        return torch.cat(losses), chosen

    def chunk_logits(self, hidden: Tensor, weight: Tensor, most_elements: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield each chunk of tokens with its logits [m, rows]; all chunks share the memory of the logits."""
        rows = weight[: self.rows]
        # Not by ``rows``: ranks with and without padding have the same chunks.
        chunks = [slice(*bounds) for bounds in chunk_bounds(hidden.size(0), weight.size(0), most_elements)]
        longest = max((tokens.stop - tokens.start for tokens in chunks), default=0)
        buffer = device_code(hidden).new_buffer(longest, rows.size(0), like=hidden)
        for tokens in chunks:
            logits = matmul(hidden[tokens], rows.t(), scratch=buffer[: tokens.stop - tokens.start])
            if self.bias is not None:
                logits += self.bias[: self.rows]
            yield tokens, logits

    def apply_temperature(self, logits: Tensor) -> float | None:
        """Divide ``logits`` by the temperature; returns the softcap of the result."""
        if self.temperature == 1:
            return self.softcap
        # Not the hidden states: logits in training and generation are rounded in the same places.
        logits.div_(self.temperature)
        return None if self.softcap is None else self.softcap / self.temperature

    def _choose(self, logits: Tensor, sampling: TokenSampling | None, shard_rows: int) -> Tensor:
        """The token of the largest logit, of equal ones the first, or a random token; int64 [n], equal on all ranks.

        ``shard_rows`` are the rows of each rank with padding.
        """
        if sampling is not None:
            return self._draw(logits, sampling, shard_rows)
        largest, token = logits.max(dim=1)
        token += self.start
        if self.group is None:
            return token
        ranks = self._gather(torch.stack([largest.double(), token.double()]))
        return ranks[:, 1].gather(0, ranks[:, 0].argmax(0, keepdim=True))[0].long()

    def _draw(self, logits: Tensor, sampling: TokenSampling, shard_rows: int) -> Tensor:
        """Random tokens by inversion: the first whose cumulative probability exceeds a uniform number."""
        if (cap := self.softcap) is not None:
            logits = torch.tanh(logits.float() / cap) * cap
        logits = logits.float()
        if sampling.temperature != 1:
            logits = logits / sampling.temperature
        if sampling.top_p < 1:
            smallest = _smallest_kept(self._gather_rows(logits, shard_rows), sampling.top_p)
            logits = logits.masked_fill(logits < smallest, -math.inf)
        largest = logits.amax(1, keepdim=True)
        if self.group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        # Cumulative sums of blocks, then of the chosen block: those of all tokens take longer than the logits.
        rows = logits.size(1)
        likelihoods = logits.new_zeros(len(logits), math.ceil(rows / _BLOCK_TOKENS) * _BLOCK_TOKENS)
        torch.sub(logits, largest, out=likelihoods[:, :rows])
        likelihoods[:, :rows].exp_()
        blocks = likelihoods.view(len(logits), -1, _BLOCK_TOKENS)
        # In float64: the ranks of a layout add up the same numbers in another order.
        block_sums = blocks.sum(2, dtype=torch.float64).cumsum(1)
        totals = self._gather(block_sums[:, -1])  # [tp, n]
        bounds = totals.cumsum(0)
        target = sampling.uniform() * bounds[-1]
        rank = (bounds <= target).sum(0).clamp(max=len(bounds) - 1)
        target -= (bounds - totals).gather(0, rank[None])[0]
        block = _first_above(block_sums, target)
        target -= torch.where(block > 0, block_sums.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
        chosen = blocks[torch.arange(len(blocks), device=block.device), block].cumsum(1, dtype=torch.float64)
        row = block * _BLOCK_TOKENS + _first_above(chosen, target)
        if self.group is None:
            return row + self.start
        token = torch.where(rank == self.group.rank(), row + self.start, 0)
        dist.all_reduce(token, group=self.group)
        return token

    def _gather(self, local: Tensor) -> Tensor:
        """[tp, ...] of the ranks of the vocabulary."""
        if self.group is None:
            return local[None]
        ranks = local.new_empty(self.group.size(), *local.shape)
        dist.all_gather_into_tensor(ranks.flatten(0, 1), local.contiguous(), group=self.group)
        return ranks

    def _gather_rows(self, logits: Tensor, shard_rows: int) -> Tensor:
        """Logits [n, tp * shard_rows] of all ranks, -inf for padding."""
        logits = torch.nn.functional.pad(logits, (0, shard_rows - logits.size(1)), value=-math.inf)
        return self._gather(logits).movedim(0, 1).flatten(1)


def _first_above(sums: Tensor, target: Tensor) -> Tensor:
    """Index [n] of the first of ascending ``sums`` [n, k] above ``target`` [n], or of the first of the largest."""
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())  # with a probability, if the target was rounded up
    return torch.minimum(torch.searchsorted(sums, target[:, None], right=True), last)[:, 0]


def _smallest_kept(logits: Tensor, top_p: float) -> Tensor:
    """Smallest logit [n, 1] of the most probable tokens whose probabilities [n, V] together reach ``top_p``."""
    ordered = logits.sort(1, descending=True).values
    probabilities = ordered.softmax(1).double()
    is_kept = probabilities.cumsum(1) - probabilities < top_p  # the probability before a token
    return ordered.where(is_kept, math.inf).amin(1, keepdim=True)


_BLOCK_TOKENS = 128
ALL_ROWS = VocabShard()


@dataclass(frozen=True, slots=True)
class TeacherOutput:
    """The teacher's hidden states of the loss tokens, and its output projection."""

    hidden: Tensor
    """[n, H of the teacher]"""
    weight: Tensor
    """[V / tp, H of the teacher], the tokens of the student's rows."""
    shard: VocabShard
    settings: DistillConfig

    def logits(self, tokens: slice, *, out: Tensor) -> Tensor:
        """Overwrite ``out`` [m, student's rows] with the logits of these tokens."""
        rows = self.weight[: self.shard.rows]
        matmul(self.hidden[tokens], rows.t(), out=out[:, : rows.size(0)])
        if self.shard.bias is not None:
            out[:, : rows.size(0)] += self.shard.bias[: self.shard.rows]
        if (cap := self.shard.softcap) is not None:
            out.div_(cap).tanh_().mul_(cap)
        out[:, rows.size(0) :] = distillation_loss.ABSENT
        return out


def _weight_grads(weight: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The tensor to add the gradient of ``weight`` to, and whether it is new: then it is returned to autograd."""
    if weight is None or not weight.requires_grad:
        return None, None
    if (main_grad := getattr(weight, "main_grad", None)) is not None:
        return main_grad, None
    new = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    return new, new


def _mark_as_added(parameter: Any) -> None:
    """Tell the data-parallel wrapper that ``main_grad`` has the gradient."""
    if parameter is not None and parameter.requires_grad:
        parameter.grad_added_to_main_grad = True


class _LinearCrossEntropy(torch.autograd.Function):
    """Sums the losses and computes the gradients in the forward pass; with a teacher, those of distillation."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        shard: VocabShard,
        grad_scale: Tensor | None,
        wants_grad: bool,
        teacher: TeacherOutput | None,
    ) -> Tensor:
        gradients = grad_hidden = grad_weight = grad_bias = None
        if wants_grad:
            grad_hidden, (weight_sum, grad_weight) = torch.empty_like(hidden), _weight_grads(weight)
            bias_sum, grad_bias = _weight_grads(bias)
            gradients = Gradients(grad_scale, grad_hidden, weight_sum, bias_sum)
        if teacher is None:
            loss_sum = torch.zeros((), dtype=torch.float32, device=hidden.device)
            chunks = shard.chunk_losses(hidden, weight, labels, gradients)
        else:
            loss_sum = torch.zeros(3, dtype=torch.float32, device=hidden.device)
            chunks = shard.distillation_losses(hidden, weight, labels, teacher, gradients)
        for losses in chunks:
            loss_sum += losses.sum(0)
        ctx.weight, ctx.bias, ctx.grad_scale = weight, bias, grad_scale
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return loss_sum

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        upstream = grads[0] if grads[0].dim() == 0 else grads[0][0]  # of the loss; its parts are for reports
        scale = upstream if ctx.grad_scale is None else upstream / ctx.grad_scale
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(scale).to(ctx.weight.dtype)
        else:
            message = "the gradient was computed in the forward pass, for a loss gradient of 1 times the loss scale"
            torch._assert_async(scale == 1, message)
            _mark_as_added(ctx.weight)
        if grad_bias is not None:
            grad_bias = grad_bias.mul_(scale).to(ctx.bias.dtype)
        else:
            _mark_as_added(ctx.bias)
        return grad_hidden * scale.to(grad_hidden.dtype), grad_weight, grad_bias, None, None, None, None, None


class _TokenCrossEntropy(torch.autograd.Function):
    """Returns per-token losses; recomputes the logits in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, shard: VocabShard
    ) -> Tensor:
        empty = torch.empty(0, dtype=torch.float32, device=hidden.device)
        ctx.weight, ctx.bias, ctx.shard = weight, bias, shard
        ctx.save_for_backward(hidden, weight, labels)
        return torch.cat([empty, *shard.chunk_losses(hidden, weight, labels)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors

        def add(gradients: Gradients) -> None:
            for _ in ctx.shard.chunk_losses(hidden, weight, labels, gradients):
                pass

        return *recomputed_gradients(hidden, ctx.weight, ctx.bias, grads[0], add), None, None


def recomputed_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor, add: Callable[[Gradients], None]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients to return to autograd of ``hidden``, ``weight`` and ``bias``.

    ``grad`` is the gradient of the losses, [n]; ``add`` computes the others in the memory that it is called with.
    """
    grad_hidden, (weight_sum, grad_weight) = torch.empty_like(hidden), _weight_grads(weight)
    bias_sum, grad_bias = _weight_grads(bias)
    add(Gradients(grad[:, None].contiguous(), grad_hidden, weight_sum, bias_sum))
    if grad_weight is not None:
        grad_weight = grad_weight.to(weight.dtype)
    else:
        _mark_as_added(weight)
    if grad_bias is not None:
        assert bias is not None
        grad_bias = grad_bias.to(bias.dtype)
    else:
        _mark_as_added(bias)
    return grad_hidden, grad_weight, grad_bias


def chunk_bounds(num_tokens: int, num_rows: int, most_elements: int) -> Iterator[tuple[int, int]]:
    """Start and end of chunks of about equal size with at most ``most_elements`` logits."""
    most = max(1, most_elements // max(1, num_rows))
    size = math.ceil(num_tokens / max(1, math.ceil(num_tokens / most)))
    for start in range(0, num_tokens, max(1, size)):
        yield start, min(start + size, num_tokens)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    shard: VocabShard = ALL_ROWS,
    *,
    grad_scale: Tensor | None = None,
) -> Tensor:
    """Sum of the cross entropies of ``hidden @ weight.T`` against ``labels``, a float32 scalar, equal on every rank.

    Args:
        hidden: [n, H] of the loss tokens, equal on all tp ranks; its gradient has to be summed over tp.
        weight: [V / tp, H]; its gradient is added to ``main_grad`` in the forward pass, if it has one.
        labels: int64 [n], indices into the full vocabulary.
        shard: the vocabulary rows of ``weight``.
        grad_scale: the scalar gradient of the loss (float16 loss scale); None means one.
    """
    return _sum_of_losses(hidden, weight, labels, shard, grad_scale, None)


def linear_distillation(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    shard: VocabShard = ALL_ROWS,
    *,
    teacher: TeacherOutput,
    grad_scale: Tensor | None = None,
) -> Tensor:
    """Sums of loss, divergence from the teacher and cross entropy, float32 [3]; only the loss has a gradient.

    Other arguments and gradients are those of :func:`linear_cross_entropy`.
    """
    return _sum_of_losses(hidden, weight, labels, shard, grad_scale, teacher)


def _sum_of_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    shard: VocabShard,
    grad_scale: Tensor | None,
    teacher: TeacherOutput | None,
) -> Tensor:
    # Check outside the Function, where autograd is off and needs_input_grad is true even under no_grad.
    wants_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    scale = grad_scale if wants_grad else None
    return _LinearCrossEntropy.apply(hidden, weight, shard.bias, labels, shard, scale, wants_grad, teacher)


def token_cross_entropies(hidden: Tensor, weight: Tensor, labels: Tensor, shard: VocabShard = ALL_ROWS) -> Tensor:
    """Per-token losses, float32 [n]; otherwise like :func:`linear_cross_entropy`."""
    return _TokenCrossEntropy.apply(hidden, weight, shard.bias, labels, shard)


@torch.no_grad()
def token_scores(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor | None,
    shard: VocabShard = ALL_ROWS,
    *,
    sampling: TokenSampling | None = None,
) -> Tensor:
    """Per-token losses and the most probable tokens, or with ``sampling`` random ones; float64 [2, n], no gradient.

    See :meth:`VocabShard.scores`.
    """
    losses, tokens = shard.scores(hidden, weight, labels, sampling)
    return torch.stack([losses.double(), tokens.double()])
