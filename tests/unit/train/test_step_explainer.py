from __future__ import annotations

import random
from collections.abc import Iterable

from isthmus.engine.nonfinite import NonFinite
from isthmus.train.step_explainer import SpikeDetector, _described, _explanation


def spikes(values: Iterable[float], factor: float = 10.0) -> list[int]:
    """Positions of the new spikes."""
    detector, result = SpikeDetector(factor), []
    for position, value in enumerate(values):
        detector.update_limit()
        if detector.is_new_spike(value):
            result.append(position)
    return result


def test_spikes_are_far_from_the_values_before() -> None:
    numbers = random.Random(0)
    falling = [3.0 * 0.995**step * numbers.uniform(0.9, 1.1) for step in range(300)]
    assert spikes(falling) == []
    assert spikes([*falling, 8.0, 9.0, 0.7, 4.0]) == [300, 303], "9.0 belongs to the spike before"
    assert spikes([1.0] * 19 + [1e9]) == [], "too few to compare with"
    assert spikes([1.0] * 20 + [1.4, 1.6]) == [21], "a constant has a spread of 5%"


def test_a_few_spikes_do_not_move_the_limit() -> None:
    every_tenth = [50.0 if step % 10 == 0 else 1.0 + 0.01 * (step % 3) for step in range(100)]
    assert spikes(every_tenth, factor=5.0) == [20, 30, 40, 50, 60, 70, 80, 90]


def test_sentences() -> None:
    first = NonFinite("output gradient", "decoder.layers.3.mlp", 1, (3, -3, 0, 7), 0, (17,))
    origins = [{"sample": 17, "file": "chats.jsonl", "record": 18}, {"sample": 4, "file": "a.bin", "sequence": 3}]
    assert _explanation(first, ["a", "b"], origins) == (
        "The first value that is not finite is in the gradient of the output of decoder.layers.3.mlp, on rank 1 on b, "
        "in sample 17 (record 18 of chats.jsonl), sample 4 (sequence 3 of a.bin)."
    )
    assert _described({"sample": 2}) == "sample 2"
    assert "computed again, has only finite values" in _explanation(None, ["a"], [])
