"""A tokenizer for the data tests."""

from __future__ import annotations

import pytest

from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(train_tokenizer(["the sea is wide and blue"], vocab_size=270))
