"""Advantages of answers from the rewards of their groups."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from isthmus.config.schema.grpo import GrpoConfig

Float64 = npt.NDArray[np.float64]
_EPSILON = 1e-4
"""Added to standard deviations, as in TRL."""


def advantages(rewards: Float64, group_size: int, settings: GrpoConfig) -> Float64:
    """The advantage of each answer, [answers]; ``rewards`` [answers] are those of group after group.

    NaN is an answer without a reward: it has no part in means and deviations, and its advantage is 0.

    The reward minus the mean of its group, divided by a standard deviation (of a sample, n - 1) as
    ``grpo.scale_advantages`` says: equation 1 of arXiv 2402.03300 (group), arXiv 2503.20783 (none), arXiv 2508.08221
    (batch). ``rloo``: minus the mean of the others of its group, equation 7 of arXiv 2402.14740. ``reinforce_pp``:
    minus the mean of its group, normalized over the batch, as REINFORCE++-baseline of arXiv 2501.03262.
    """
    groups = rewards.reshape(-1, group_size)
    counts = np.count_nonzero(~np.isnan(groups), axis=1, keepdims=True)
    centered = groups - np.nansum(groups, axis=1, keepdims=True) / np.maximum(counts, 1)
    if settings.loss == "rloo":
        centered = centered * counts / np.maximum(counts - 1, 1)
    scale = settings.advantage_scale
    if scale == "group":
        variances = np.nansum(centered**2, axis=1, keepdims=True) / np.maximum(counts - 1, 1)
        centered = centered / (np.sqrt(variances) + _EPSILON)
    elif scale == "batch":
        spread = centered if settings.loss == "reinforce_pp" else rewards
        known = spread[~np.isnan(spread)]
        centered = centered / ((known.std(ddof=1) if len(known) > 1 else 0.0) + _EPSILON)
    return np.nan_to_num(centered.reshape(-1), nan=0.0)


def has_variance(rewards: Float64, group_size: int) -> npt.NDArray[np.bool_]:
    """Whether the rewards of each group differ, [groups]."""
    groups = rewards.reshape(-1, group_size)
    first = np.fmax.reduce(groups, axis=1)  # without NaN
    return np.asarray(first > np.fmin.reduce(groups, axis=1))


def length_penalties(lengths: npt.NDArray[np.int64], max_new_tokens: int, penalty_tokens: int) -> Float64:
    """Minus 0 to 1 for answers within ``penalty_tokens`` of the limit, [answers]; equation 13 of arXiv 2503.14476."""
    if not penalty_tokens:
        return np.zeros(len(lengths))
    return np.clip((max_new_tokens - penalty_tokens - lengths) / penalty_tokens, -1.0, 0.0)
