"""Compares the float32 logits of two models on disk on the same tokens.

transformers runs Hugging Face folders, Megatron-Core runs checkpoints. Comparing the two also checks the model
implementation and the config, not only the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.convert.canonical import Progress
from isthmus.convert.open_model import OpenedModel
from isthmus.convert.verify.model_runner import float32_bytes, memory_plan, open_network, run_layers, runner_names
from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture

TOLERANCE = 1e-4
TOKENS = 64
_CHEAP_MULTIPLICATIONS = 10**12
_CHEAP_BYTES = 1 << 28
_KL_ROWS = 64
"""Rows converted to float64 at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitsCheck:
    """``tokens`` is the length of a sample; ``by_layer`` loads weights layer by layer even if all fit.

    ``trust_remote_code`` permits to run modelling code in a model folder.
    """

    tolerance: float = TOLERANCE
    tokens: int | None = None
    by_layer: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class LogitsDifference:
    """``mean_kl_nats`` is KL(first || second) of the next-token distribution, mean over tokens.

    ``where`` is the first layer whose output differs; ``how`` describes the run.
    """

    max_abs: float
    mean_kl_nats: float
    tolerance: float
    where: str
    how: str

    @property
    def same(self) -> bool:
        """Whether no logit differs by more than the tolerance; NaN differs."""
        return self.max_abs <= self.tolerance

    def __str__(self) -> str:
        by = f"by {self.max_abs:.3g} at most (tolerance {self.tolerance:g}) and {self.mean_kl_nats:.3g} nats a token"
        agree = f"their logits agree, {by}" if self.same else f"their logits differ {by}; {self.where}"
        return f"{agree} ({self.how})"


@torch.no_grad()
def compare_logits(
    a: OpenedModel, b: OpenedModel, check: LogitsCheck, progress: Progress = lambda done, total: None
) -> LogitsDifference:
    """Run both models on the same random tokens; ``progress`` counts float32 bytes of weights.

    A UsageError if one cannot be run, the vocabulary sizes differ, or a layer does not fit into memory.
    """
    if a.arch.head.score_head or b.arch.head.score_head:
        raise UsageError("a reward model has scores and no logits. Omit --logits, which still compares all tensors.")
    if a.arch.vocab_size != b.arch.vocab_size:
        raise UsageError(
            f"vocabularies of {a.arch.vocab_size} and {b.arch.vocab_size} tokens cannot be compared. Omit --logits."
        )
    by_layer, why = memory_plan(a, b, by_layer=check.by_layer)
    nbytes = [sum(float32_bytes(side).values()) for side in (a, b)]
    context = min(filter(None, (_comparable_context(a), _comparable_context(b))), default=None)
    lengths, not_reached = sample_lengths(a.arch, b.arch, max(nbytes) // 4, check.tokens, context)
    samples = random_samples(a.arch.vocab_size, lengths)
    total, done = len(samples) * sum(nbytes), 0.0
    states: dict[tuple[int, int], Tensor] = {}
    differing: list[int] = []

    def run(side: OpenedModel, size: int, inspect: Callable[[tuple[int, int], Tensor], None]) -> list[Tensor]:
        logits = []
        with open_network(side, by_layer=by_layer, trust_remote_code=check.trust_remote_code) as network:
            step = size / (len(network.layers) + 1)
            for number, sample in enumerate(samples):

                def seen(passed: int, hidden: Tensor, number: int = number) -> None:
                    nonlocal done
                    inspect((number, passed), hidden)
                    done += step
                    progress(round(done), total)

                logits.append(run_layers(network, sample, seen, by_layer=by_layer))
        return logits

    def store(key: tuple[int, int], hidden: Tensor) -> None:
        states[key] = hidden.clone()

    def compare(key: tuple[int, int], hidden: Tensor) -> None:
        before = states.pop(key, None)
        if before is None or _differ(before, hidden, check.tolerance):
            differing.append(key[1])

    pairs = list(zip(run(a, nbytes[0], store), run(b, nbytes[1], compare), strict=True))
    max_abs = torch.stack([(first - second).abs().max() for first, second in pairs]).max().item()
    kl = sum(_kl(first, second) for first, second in pairs) / sum(sample.numel() for sample in samples)
    tokens = " and ".join(str(length) for length in dict.fromkeys(lengths))
    how = f"fp32, {runner_names(a, b)}, 2 samples of {tokens} tokens, {why}{not_reached}"
    where = "" if max_abs <= check.tolerance else _first_difference(differing, a.arch.num_layers)
    return LogitsDifference(max_abs, kl, check.tolerance, where, how)


def sample_lengths(
    a: Architecture, b: Architecture, parameters: int, tokens: int | None, context: int | None = None
) -> tuple[tuple[int, int], str]:
    """Lengths of two samples that both models can run, and a note if they are too short.

    The second is longer than any attention window or original context, if that is cheap with so many ``parameters``.
    ``tokens`` is the requested length; None is 64. ``context`` is the longest for which transformers computes what
    Isthmus does; None is any.
    """
    if context is not None:
        beyond = f"beyond {context} tokens transformers keeps the short factors of longrope, and Isthmus does not"
        if (tokens or 0) > context:
            raise UsageError(f"--tokens {tokens}: {beyond}. Use {context} or fewer.")
        short = min(tokens or TOKENS, context)
        return (short, short), f"; {beyond}"
    limits = [arch.max_position_embeddings for arch in (a, b) if arch.embedding.position == "learned"]
    if limits and tokens is not None and tokens > min(limits):
        raise UsageError(f"--tokens {tokens}: there are {min(limits)} positions. Use {min(limits)} or fewer.")
    short = min([tokens or TOKENS, *limits])
    span = max(_span(arch) for arch in (a, b))
    long = min([span + short, *limits])
    if short > span or long == short:
        return (short, short), ""
    scores = long * max(arch.attention.num_attention_heads for arch in (a, b))
    if parameters * long <= _CHEAP_MULTIPLICATIONS and 4 * long * max(a.vocab_size, scores) <= _CHEAP_BYTES:
        return (short, long), ""
    return (short, short), f"; --tokens {long} would reach beyond the window or original context of {span}"


def _comparable_context(model: OpenedModel) -> int | None:
    scaling = model.arch.rotary.rope_scaling
    if not model.family.short_factors_in_transformers or scaling is None or scaling.short_factor == scaling.long_factor:
        return None
    return scaling.original_max_position_embeddings


def _span(arch: Architecture) -> int:
    """The largest attention window or original context."""
    windows = [window for layer in range(arch.num_layers) if (window := arch.windows.of(layer)) is not None]
    scaling = arch.rotary.rope_scaling
    contexts = [scaling.original_max_position_embeddings] if scaling is not None and scaling.kind != "linear" else []
    return max([*windows, *contexts], default=0)


def random_samples(vocab_size: int, lengths: tuple[int, int]) -> list[Tensor]:
    """int64 [B, S]; samples of equal length form one batch."""
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randint(0, vocab_size, (1, length), generator=generator) for length in lengths]
    return [torch.cat(samples)] if lengths[0] == lengths[1] else samples


def _differ(first: Tensor, second: Tensor, tolerance: float) -> bool:
    """Whether hidden states differ, relative to the largest, which can be in the thousands."""
    if first.shape != second.shape:
        return True
    return not (first - second).abs().max().item() <= tolerance * max(1.0, first.abs().max().item())


def _kl(first: Tensor, second: Tensor) -> float:
    """KL divergence in nats of logits [T, V], summed over T."""
    total = 0.0
    for p, q in zip(first.split(_KL_ROWS), second.split(_KL_ROWS), strict=True):
        log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
        total += (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0).sum().item()
    return total


def _first_difference(differing: Sequence[int], num_layers: int) -> str:
    if not differing:
        return f"hidden states agree after all {num_layers} layers, so check the final norm and the output layer"
    if min(differing) == 0:
        return "hidden states differ before the first layer"
    return f"the first layer after which hidden states differ is {min(differing) - 1} (of 0 to {num_layers - 1})"
