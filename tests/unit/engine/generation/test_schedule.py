"""Continuous batching: waiting prompts take the slots of complete sequences."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from isthmus.engine.generation.schedule import Answer, RankInputs, Schedule

LENGTHS = [2, 5, 1, 3, 4, 1, 2]
"""Tokens of the answer to each prompt; prompt n is n + 1 tokens of value n."""


def schedule_of(ranks: int, slots: int, batch_tokens: int) -> Schedule:
    prompts = [[number] * (number + 1) for number in range(len(LENGTHS))]
    schedule = Schedule(prompts, lambda index, answer: len(answer.tokens) < LENGTHS[index], numbers=range(len(prompts)))
    schedule.start(ranks, slots, batch_tokens)
    return schedule


def run(schedule: Schedule, ranks: int, slots: int) -> list[Sequence[RankInputs]]:
    """All passes of a model that answers with 100 times the number of tokens so far, and the first token."""
    states: list[list[list[int]]] = [[[] for _ in range(slots)] for _ in range(ranks)]
    passes = []
    while inputs := schedule.next_pass():
        passes.append(inputs)
        results = []
        for rank, rank_inputs in enumerate(inputs):
            for source, target in rank_inputs.copies:
                states[rank][target] = states[rank][source]
            for slot, (tokens, past) in enumerate(
                zip(rank_inputs.tokens, rank_inputs.past, strict=True), start=rank_inputs.first
            ):
                states[rank][slot] = [*states[rank][slot][:past], *tokens] if past else list(tokens)
                assert len(states[rank][slot]) == past + len(tokens)
            first = rank_inputs.first
            sequences = states[rank][first : first + len(rank_inputs.tokens)]
            results.append([(0.5, 100 * len(sequence) + sequence[0]) for sequence in sequences])
        schedule.add(results)
    return passes


@pytest.mark.parametrize(("ranks", "slots"), [(1, 1), (1, 3), (2, 2), (3, 7)])
def test_each_sequence_continues_its_own_state(ranks: int, slots: int) -> None:
    schedule = schedule_of(ranks, slots, batch_tokens=8)
    run(schedule, ranks, slots)
    expected = [
        Answer([100 * (number + 1 + step) + number for step in range(length)], [-0.5] * length)
        for number, length in enumerate(LENGTHS)
    ]
    assert schedule.answers == expected


def test_a_prefill_has_no_more_tokens_than_a_batch_and_steps_use_all_slots() -> None:
    passes = run(schedule_of(1, 3, batch_tokens=5), 1, 3)
    prefills = [inputs.numbers for (inputs,) in passes if inputs.is_prefill]
    assert prefills[0] == (0, 1)  # 3 tokens; the third prompt has 3 more
    assert all(sum(map(len, inputs.tokens)) <= 5 or len(inputs.tokens) == 1 for (inputs,) in passes)
    assert sum(len(inputs.tokens) for (inputs,) in passes) == sum(LENGTHS)


@pytest.mark.parametrize(("ranks", "slots", "computations"), [(1, 2, 3), (1, 6, 1), (2, 3, 2)])
def test_equal_prompts_are_computed_once(ranks: int, slots: int, computations: int) -> None:
    """By a rank, in as many slots as it has."""
    prompts = [[7, 8, 9]] * 4 + [[5]] * 2 + [[6, 6]]
    lengths = [3, 1, 2, 3, 1, 2, 1]
    schedule = Schedule(prompts, lambda index, answer: len(answer.tokens) < lengths[index], numbers=range(len(prompts)))
    schedule.start(ranks, slots, batch_tokens=8)
    passes = run(schedule, ranks, slots)
    for prompt, length, answer in zip(prompts, lengths, schedule.answers, strict=True):
        assert answer.tokens == [100 * (len(prompt) + step) + prompt[0] for step in range(length)]
    computed = [tokens for inputs in passes for rank in inputs if rank.is_prefill for tokens in rank.tokens]
    assert computed.count((5,)) == 2 and computed.count((6, 6)) == 1  # no prompt of one token, and no single one
    assert computed.count((7, 8)) + computed.count((7, 8, 9)) == computations
