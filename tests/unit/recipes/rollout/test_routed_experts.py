"""Router replay: what servers return is decoded and checked, and servers and models that cannot replay are refused."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from isthmus.errors import DataError, UsageError
from isthmus.recipes.rollout.routed_experts import RouterShapes, replay_shapes
from unit.recipes.rollout.fake_vllm import encoded, rollout_config

SHAPES = RouterShapes(num_layers=3, expert_layers=(0, 2), num_experts=6, top_k=2)


def experts_of(tokens: int, dtype: Any = np.uint8) -> Any:
    """Different experts in each row; zeros in layer 1, which has no experts."""
    experts = np.random.default_rng(0).random((tokens, 3, 6)).argsort(axis=-1)[..., :2].astype(dtype)
    experts[:, 1] = 0
    return experts


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_experts_of_all_tokens_but_the_last(dtype: Any) -> None:
    experts = experts_of(4, dtype)
    decoded = SHAPES.decoded(encoded(experts), 5, "the server")
    assert decoded.dtype == np.uint8 and decoded.tolist() == experts.tolist()


def test_numbers_of_many_experts_have_two_bytes() -> None:
    shapes = RouterShapes(num_layers=1, expert_layers=(0,), num_experts=257, top_k=1)
    assert shapes.decoded(encoded(np.full((1, 1, 1), 256, np.uint16)), 2, "s").tolist() == [[[256]]]


def with_value(index: tuple[int, ...], value: int) -> Any:
    experts = experts_of(4)
    experts[index] = value
    return experts


@pytest.mark.parametrize(
    ("value", "message"),
    [
        pytest.param(None, "got NoneType", id="nothing"),
        pytest.param("no base64", "returns no valid routed_experts", id="text"),
        pytest.param(base64.b64encode(b"no file").decode(), "returns no valid routed_experts", id="no-array"),
        pytest.param(encoded(experts_of(5)), r"= \(4, 3, 2\), got \(5, 3, 2\)", id="too-many-tokens"),
        pytest.param(encoded(experts_of(4)[:, :2]), r"got \(4, 2, 2\)", id="too-few-layers"),
        pytest.param(encoded(experts_of(4)[..., :1]), r"got \(4, 3, 1\)", id="too-few-experts"),
        pytest.param(encoded(experts_of(4, np.float32)), "expected integers, got float32", id="floats"),
        pytest.param(
            encoded(with_value((3, 2, 0), 6)), "expected experts from 0 to 5, got 0 to 6", id="no-such-expert"
        ),
        pytest.param(encoded(with_value((1, 2), 0)), r"token 1 has an expert twice in layer 2: \[0, 0\]", id="twice"),
    ],
)
def test_other_replies_are_refused(value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        SHAPES.decoded(value, 5, "the server")
    assert "Start it with --enable-return-routed-experts" in str(error.value)


def architecture(score: str | None) -> Any:
    moe = None if score is None else SimpleNamespace(score=score, num_experts=6, top_k=2)
    layers = [SimpleNamespace(number=n, experts=None if n == 1 else moe) for n in range(3)]
    return SimpleNamespace(family="some", moe=moe, layers=layers, num_layers=3)


def test_shapes_are_those_of_the_model() -> None:
    assert replay_shapes(rollout_config("http://a:1"), architecture("softmax")) == SHAPES
    assert replay_shapes(rollout_config("http://a:1", router_replay=False), architecture("softmax")) is None
    assert replay_shapes(rollout_config(engine="native", url=[]), architecture("softmax")) is None


@pytest.mark.parametrize(
    ("score", "reason"),
    [(None, "some without experts has no choice"), ("sparsemixer", "some draws its experts at random")],
)
def test_models_without_a_choice_to_replay(score: str | None, reason: str) -> None:
    assert replay_shapes(rollout_config("http://a:1"), architecture(score)) is None
    with pytest.raises(UsageError, match=f"router_replay=true: {reason}"):
        replay_shapes(rollout_config("http://a:1", router_replay=True), architecture(score))
