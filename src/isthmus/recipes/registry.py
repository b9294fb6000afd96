"""All recipes by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from isthmus.config.recipes import RECIPE_SETTINGS, RecipeName
from isthmus.config.schema import RunConfig
from isthmus.recipes.recipe import Recipe

RECIPES: Mapping[RecipeName, Recipe] = {
    name: importlib.import_module(f"isthmus.recipes.{name}").RECIPE for name in RECIPE_SETTINGS
}
"""A module without a ``RECIPE``, or a name without a module, is an error here and not another recipe."""


def recipe_of(config: RunConfig) -> Recipe:
    return RECIPES[config.recipe]
