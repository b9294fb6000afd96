"""The fused distillation loss equals TRL's on whole logits, without their memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from isthmus.config.schema.distillation import DistillConfig
from isthmus.engine.loss import cross_entropy_cpu
from isthmus.engine.loss.linear_cross_entropy import TeacherOutput, VocabShard, linear_distillation
from unit.engine.recorder import Recorder

VOCAB, HIDDEN, TOKENS = 300, 16, 37
CAP = 5.0


def drawn() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states and projection of student and teacher, and labels."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, HIDDEN, generator=generator) for size in (TOKENS, VOCAB))
    teacher_hidden, teacher_weight = (torch.randn(size, 24, generator=generator) for size in (TOKENS, VOCAB))
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), teacher_hidden, teacher_weight * 0.7, labels


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of ten tokens in blocks of four."""
    monkeypatch.setattr(cross_entropy_cpu, "CHUNK_ELEMENTS", 10 * VOCAB)
    monkeypatch.setattr(cross_entropy_cpu, "BLOCK_ELEMENTS", 4 * VOCAB)


def ours(settings: DistillConfig, softcap: float | None = None) -> tuple[Tensor, ...]:
    hidden, weight, teacher_hidden, teacher_weight, labels = drawn()
    output = TeacherOutput(teacher_hidden, teacher_weight, VocabShard(rows=VOCAB, softcap=softcap), settings)
    result = linear_distillation(hidden, weight, labels, VocabShard(rows=VOCAB, softcap=softcap), teacher=output)
    return result, *torch.autograd.grad(result[0] * 3, (hidden, weight))


def trl(settings: DistillConfig, softcap: float | None = None) -> tuple[Tensor, ...]:
    """TRL's loss plus the weighted cross entropy."""
    gkd = pytest.importorskip("trl.experimental.gkd", reason="TRL is not installed (extra: bench)")
    hidden, weight, teacher_hidden, teacher_weight, labels = drawn()
    student, target = hidden @ weight.t(), teacher_hidden @ teacher_weight.t()
    if softcap is not None:
        student, target = (softcap * torch.tanh(item / softcap) for item in (student, target))
    divergence = gkd.GKDTrainer.generalized_jsd_loss(
        student, target, beta=settings.beta, temperature=settings.temperature, reduction="sum"
    )
    cross_entropy = torch.nn.functional.cross_entropy(student, labels, reduction="sum")
    loss = divergence + settings.sft_weight * cross_entropy
    return torch.stack((loss, divergence, cross_entropy)), *torch.autograd.grad(loss * 3, (hidden, weight))


def error(results: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    pairs = zip(results, expected, strict=True)
    return max(((got - right).abs().max() / right.abs().max()).item() for got, right in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize(
    ("temperature", "sft_weight", "softcap"), [(1.0, 0.0, None), (1.0, 0.5, CAP), (2.5, 0.0, CAP), (0.7, 0.5, None)]
)
def test_loss_and_gradients_equal_trl(
    beta: float, temperature: float, sft_weight: float, softcap: float | None
) -> None:
    settings = DistillConfig(beta=beta, temperature=temperature, sft_weight=sft_weight)
    assert error(ours(settings, softcap), trl(settings, softcap)) < 1e-5


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_top_k_compares_the_rest_as_one_token(beta: float) -> None:
    """The divergence of k + 1 probabilities, as TRL's trainers with a tail."""
    settings = DistillConfig(beta=beta, temperature=1.5, top_k=7, sft_weight=0.2)
    hidden, weight, teacher_hidden, teacher_weight, labels = drawn()
    student, target = hidden @ weight.t(), teacher_hidden @ teacher_weight.t()
    chosen = target.topk(7).indices
    merged = []
    for logits in (student, target):
        probabilities = (logits / 1.5).softmax(1)
        remaining = probabilities.gather(1, chosen)
        rest = probabilities.scatter(1, chosen, 0.0).sum(1, keepdim=True)
        merged.append(torch.cat((remaining, rest), 1).log())
    gkd = pytest.importorskip("trl.experimental.gkd", reason="TRL is not installed (extra: bench)")
    divergence = gkd.GKDTrainer.generalized_jsd_loss(*merged, beta=beta, reduction="sum")
    cross_entropy = torch.nn.functional.cross_entropy(student, labels, reduction="sum")
    loss = divergence + 0.2 * cross_entropy
    expected = torch.stack((loss, divergence, cross_entropy)), *torch.autograd.grad(loss * 3, (hidden, weight))
    assert error(ours(settings), expected) < 1e-5


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_top_k_of_the_whole_vocabulary_changes_nothing(beta: float) -> None:
    for k in (VOCAB, VOCAB + 5):
        pairs = zip(ours(DistillConfig(beta=beta, top_k=k)), ours(DistillConfig(beta=beta)), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_tokens_that_the_teacher_does_not_have(beta: float) -> None:
    """The teacher's rows end earlier; the gradient lowers the student's other logits."""
    hidden, weight, teacher_hidden, teacher_weight, labels = drawn()
    output = TeacherOutput(
        teacher_hidden, teacher_weight, VocabShard(rows=VOCAB - 20, softcap=CAP), DistillConfig(beta=beta)
    )
    result = linear_distillation(hidden, weight, labels, VocabShard(), teacher=output)
    (gradient,) = torch.autograd.grad(result[0], weight)
    logits = (hidden @ weight.t()).detach().requires_grad_()
    capped = CAP * torch.tanh(teacher_hidden @ teacher_weight.t() / CAP)
    capped[:, VOCAB - 20 :] = -1e4
    log_p, log_t = logits.log_softmax(1), capped.log_softmax(1)
    if beta == 0:
        expected = (log_t.exp() * (log_t - log_p)).sum()
    elif beta == 1:
        expected = (log_p.exp() * (log_p - log_t)).sum()
    else:
        mixture = (0.5 * log_p.exp() + 0.5 * log_t.exp()).log()
        expected = 0.5 * (log_t.exp() * (log_t - mixture) + log_p.exp() * (log_p - mixture)).sum()
    (at_logits,) = torch.autograd.grad(expected, logits)
    assert error((result[1], gradient), (expected, at_logits.t() @ hidden)) < 1e-5
    assert (at_logits[:, VOCAB - 20 :] >= 0).all() and (gradient[VOCAB - 20 :] != 0).any()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("top_k", [None, 3])
def test_distant_distributions_stay_finite(beta: float, top_k: int | None) -> None:
    hidden, weight, teacher_hidden, teacher_weight, labels = drawn()
    settings = DistillConfig(beta=beta, top_k=top_k, sft_weight=1.0)
    hidden = (hidden.detach() * 300).requires_grad_()
    output = TeacherOutput(teacher_hidden * -300, teacher_weight, VocabShard(), settings)
    result = linear_distillation(hidden, weight, labels, VocabShard(), teacher=output)
    assert result.isfinite().all()
    assert all(item.isfinite().all() for item in torch.autograd.grad(result[0], (hidden, weight)))


@pytest.mark.slow
def test_logits_of_all_tokens_are_never_materialized() -> None:
    with Recorder() as seen:
        ours(DistillConfig(beta=0.5, temperature=2.0, top_k=5, sft_weight=1.0))
    # The gradient of the projection is larger than the 4 rows of a block; topk copies a chunk.
    assert seen.largest(torch.float32) <= max(10 * 320, VOCAB * 24) < TOKENS * VOCAB


def test_fp16_gradients_are_scaled_in_float32() -> None:
    hidden, weight, teacher_hidden, teacher_weight, labels = drawn()
    expected = ours(DistillConfig(beta=0.5, sft_weight=0.5))[1:]
    half = [item.detach().half().requires_grad_() for item in (hidden, weight)]
    output = TeacherOutput(teacher_hidden, teacher_weight, VocabShard(), DistillConfig(beta=0.5, sft_weight=0.5))
    scale = torch.tensor(4096.0)
    result = linear_distillation(half[0], half[1], labels, VocabShard(), teacher=output, grad_scale=scale)
    gradients = torch.autograd.grad(result[0] * scale, half)
    assert error(tuple(item.float() / 4096 * 3 for item in gradients), expected) < 2**-8


@torch.no_grad()
def test_evaluation_has_the_same_values() -> None:
    settings = DistillConfig(beta=0.5, sft_weight=0.5)
    hidden, weight, teacher_hidden, teacher_weight, labels = drawn()
    output = TeacherOutput(teacher_hidden, teacher_weight, VocabShard(), settings)
    with torch.enable_grad():
        expected = ours(settings)[0]
    assert torch.equal(linear_distillation(hidden, weight, labels, teacher=output), expected)
