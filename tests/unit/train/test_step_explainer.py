from __future__ import annotations

import random

from isthmus.engine.nonfinite import NonFinite
from isthmus.engine.sample_losses import SampleLoss
from isthmus.train.step_explainer import SpikeDetector, _described, _explanation


def test_spikes_are_far_from_the_values_before() -> None:
    numbers = random.Random(0)
    detector = SpikeDetector(10.0)
    falling = [3.0 * 0.995**step * numbers.uniform(0.9, 1.1) for step in range(300)]
    assert not any(detector.is_new_spike(value) for value in falling)
    assert detector.is_new_spike(8.0)
    assert not detector.is_new_spike(9.0), "the same spike"
    assert not detector.is_new_spike(0.7) and detector.is_new_spike(4.0)
    assert not SpikeDetector(10.0).is_new_spike(1e9), "nothing to compare with"


def test_a_few_spikes_do_not_move_the_limit() -> None:
    detector = SpikeDetector(5.0)
    for step in range(100):
        detector.is_new_spike(50.0 if step % 10 == 0 else 1.0 + 0.01 * (step % 3))
    assert detector.limit is not None and detector.limit < 2.0


def test_sentences() -> None:
    first = NonFinite("output gradient", "decoder.layers.3.mlp", 1, (3, -3, 0, 7), 0, (17,))
    origins = [{"sample": 17, "file": "chats.jsonl", "record": 18}, {"sample": 4, "file": "a.bin", "sequence": 3}]
    assert _explanation(first, ["a", "b"], origins) == (
        "The first value that is not finite is in the gradient of the output of decoder.layers.3.mlp, on rank 1 on b, "
        "in sample 17 (record 18 of chats.jsonl), sample 4 (sequence 3 of a.bin)."
    )
    assert _described({"sample": 2}) == "sample 2"
    assert "computed again, has only finite values" in _explanation(None, ["a"], [])
    assert SampleLoss(1, 2.0, 3).loss_tokens == 3
