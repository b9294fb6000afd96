"""Rewards by reward models, such as those of ``isthmus reward``."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from isthmus.errors import MissingInput, UsageError, escaped
from isthmus.hf.model_folder import ModelFolder
from isthmus.recipes.model.model_source import local_folder
from isthmus.recipes.rollout.answer_batch import AnswerBatch


class ModelReward:
    """The score of prompt and answer, rendered with the chat template of the reward model."""

    def __init__(self, setting: str, device: torch.device | None, *, trust_remote_code: bool) -> None:
        """Load the model, or only check its config without a ``device``.

        Raises:
            MissingInput: there is no such folder or repository, or it has no weights.
            UsageError: it is no classifier with one label.
            DataError: its files are damaged.
        """
        self.setting = setting
        try:
            path = local_folder(setting, weights=device is not None, code=trust_remote_code)
        except MissingInput as error:
            raise MissingInput(
                f"rollout.reward {escaped(setting)} is no reward: expected FILE.py:FUNCTION, exact_match, math_verify, "
                "format:EXPRESSION, or the folder or Hub id of a reward model. As a model: "
                f"{escaped(str(error))}"
            ) from error
        exported = path / "hf"
        folder = ModelFolder.open(exported if _is_run_folder(path) else path)
        _check_scores(setting, folder)
        if device is not None:
            from isthmus.hf.reward_scorer import RewardScorer  # imports transformers

            self._scorer = RewardScorer(folder, device, trust_remote_code=trust_remote_code)

    def check_columns(self, columns: Collection[str]) -> None:
        """It reads no field."""

    def __call__(self, batch: AnswerBatch) -> list[float]:
        """Score each answer."""
        return self._scorer(batch.prompts, batch.texts)


def _is_run_folder(path: Path) -> bool:
    return not (path / "config.json").is_file() and (path / "hf" / "config.json").is_file()


def _check_scores(setting: str, folder: ModelFolder) -> None:
    """Refuse a model without a score, or with several."""
    architecture = str((folder.config.get("architectures") or ["nothing"])[0])
    if not architecture.endswith("ForSequenceClassification"):
        raise UsageError(
            f"rollout.reward {escaped(setting)} is not a reward model: its architecture is {escaped(architecture)}, "
            "expected one that ends with ForSequenceClassification. isthmus reward trains one."
        )
    labels = len(folder.config.get("id2label") or range(folder.config.get("num_labels", 2)))
    if labels != 1:
        raise UsageError(
            f"rollout.reward {escaped(setting)} is a classifier with {labels} labels, expected 1, the score. isthmus "
            "reward trains a reward model."
        )
