"""What distinguishes a recipe: its records, batches, objective, and the models it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from isthmus.config.recipes import RECIPE_SETTINGS, RecipeName
from isthmus.config.schema import RunConfig
from isthmus.data.batching.batches import Batches
from isthmus.data.tokenize.record_kinds import RECORD_KINDS, RecordKind
from isthmus.engine.loss.objective import Objective


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A recipe of :data:`isthmus.recipes.registry.RECIPES`. Its settings are in :mod:`isthmus.config.recipes`."""

    name: RecipeName
    card: str
    """How the model was made, in the model card: "This model was ..."."""
    objective: Callable[[RunConfig], Objective]
    eval_objective: Callable[[], Objective] | None = None
    """Objective of evaluations; None: that of training."""
    batches: Callable[[RunConfig], Callable[..., Batches]] = lambda config: Batches
    samples_per_sequence: int = 1
    """Samples that ``train.micro_batch_size`` counts as one, such as the answers of a pair."""
    bin_packs: bool = True
    """With ``data.packing``, single samples are packed into sequences of ``data.seq_length``."""
    has_reference: Callable[[RunConfig], bool] = lambda config: False
    """Whether the objective needs log-probabilities under the starting weights."""
    has_teacher: bool = False
    """The objective needs the hidden states of ``distill.teacher``."""
    has_extra_forward: Callable[[RunConfig], bool] = lambda config: False
    """Whether a step has a forward pass over other samples, as many as it trains on."""
    trains_scores: bool = False
    """The model is a reward model: a score of the last token, in place of logits."""
    repeats_prompts: bool = False
    """Samples of a micro batch have the same prompt as the one before."""
    generates_answers: bool = False
    """Trains on answers that the model generates to prompts; see :mod:`isthmus.recipes.rollout`."""
    trains_mtp: bool = False
    """The objective has a loss for MTP layers."""

    @property
    def records(self) -> RecordKind:
        """What it trains on."""
        return RECORD_KINDS[RECIPE_SETTINGS[self.name].records]
