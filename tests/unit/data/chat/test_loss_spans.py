"""Characters to tokens, and the ends of turns."""

from __future__ import annotations

import pytest

from isthmus.data.chat.loss_spans import following, merged, shared_prefix, token_mask, turn_end

SPECIALS = ("<call>", "<end>", "<eos>")


def test_token_across_an_edge_has_loss():
    offsets = [(0, 2), (2, 5), (5, 6), (6, 9)]
    assert token_mask(offsets, [(3, 6)]).tolist() == [0, 1, 1, 0]
    assert token_mask(offsets, [(2, 7)]).tolist() == [0, 1, 1, 1]
    assert token_mask(offsets, []).tolist() == [0, 0, 0, 0]
    assert token_mask([], [(0, 1)]).tolist() == []


def test_pieces_of_one_character_and_tokens_without_width():
    assert token_mask([(0, 1), (1, 2), (1, 2), (2, 2), (2, 3)], [(1, 2)]).tolist() == [0, 1, 1, 0, 0]
    assert token_mask([(0, 1), (1, 1), (1, 2)], [(1, 2)]).tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("text", "learned"),
    [
        ("words<end>\n", "words<end>"),
        ("words<end>\n<eos>", "words<end>"),
        ("words<call> <end>", "words<call> <end>"),
        ("words <eos> ", "words <eos>"),
        ("words<call><eos>", "words<call><eos>"),
        ("words\n", "words\n"),
        ("a<end>b\n", "a<end>b\n"),
        ("<end>\n", "<end>"),
    ],
)
def test_turn_ends_after_its_token(text, learned):
    full = "<end>" + text
    assert full[5 : turn_end(full, (5, len(full)), SPECIALS, "<end>")] == learned


def test_following_token():
    assert following("ab <end>", 2, "<end>") == 8
    assert following("ab c<end>", 2, "<end>") is None
    assert following("ab", 2, None) is None


def test_merged_and_shared_prefix():
    assert merged([(5, 7), (0, 2), (2, 3), (4, 4)]) == [(0, 3), (5, 7)]
    assert shared_prefix("abc", "abd", "abcd") == "ab"
    assert shared_prefix("ab", "abc") == "ab"
    assert shared_prefix("a") == "a"
