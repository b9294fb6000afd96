"""Recipes are objects: every name has one, and nothing else asks for a recipe's name."""

from __future__ import annotations

from typing import get_args

import pytest

from isthmus.config.load import load_config
from isthmus.config.recipes import RECIPE_SETTINGS, RecipeName
from isthmus.config.schema import RunConfig
from isthmus.data.tokenize.record_kinds import RECORD_KINDS
from isthmus.errors import UsageError
from isthmus.recipes.registry import RECIPES, recipe_of

REQUIRED = {"distill.teacher": "teacher", "rollout.reward": "exact_match"}


def config_of(recipe: RecipeName) -> RunConfig:
    required = {name: REQUIRED[name] for name in RECIPE_SETTINGS[recipe].required}
    return load_config(recipe, None, flags={"model": "m", "out": "o", "data": ["d.jsonl"], **required})


def test_every_name_has_a_recipe() -> None:
    assert set(get_args(RecipeName)) == set(RECIPE_SETTINGS) == set(RECIPES)
    assert {name: recipe.name for name, recipe in RECIPES.items()} == {name: name for name in RECIPES}


@pytest.mark.parametrize("name", RECIPES)
def test_traits_agree_with_each_other(name: RecipeName) -> None:
    config = config_of(name)
    recipe, settings = recipe_of(config), RECIPE_SETTINGS[name]
    batches = recipe.batches(config)
    assert recipe.records in RECORD_KINDS.values() and recipe.card
    assert recipe.records.is_text == settings.takes_documents
    assert (recipe.records.is_answers or recipe.generates_answers) == (settings.answers is not None)
    assert recipe.generates_answers == recipe.records.has_columns == ("rollout" in settings.sections)
    assert recipe.samples_per_sequence == max(1, len(recipe.records.roles))
    assert recipe.bin_packs == (settings.answers is None)
    assert recipe.trains_scores == (not settings.generates)
    assert callable(batches) and recipe.objective(config).sums is not None
    assert recipe.has_teacher == ("distill.teacher" in settings.required)


FOREIGN = [(name, other) for name in RECIPES for other in RECIPES if other != name and other in RunConfig.model_fields]


@pytest.mark.parametrize(("name", "other"), FOREIGN)
def test_settings_of_other_recipes_are_refused(name: RecipeName, other: RecipeName) -> None:
    setting, value = next((key, value) for key, value in RunConfig.model_fields[other].default if type(value) is float)
    flags = {"model": "m", "out": "o", "data": ["d.jsonl"], f"{other}.{setting}": value / 2 + 0.01}
    flags |= {key: REQUIRED[key] for key in RECIPE_SETTINGS[name].required}
    with pytest.raises(UsageError, match=f"is for recipe {other}, got {name}"):
        load_config(name, None, flags=flags)
