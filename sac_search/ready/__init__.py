"""Workloads that need no Python of the user's: made from a recipe, by a library's model.

Random parameters, a random batch, the loss that the model is made for. The libraries are imported
only when a recipe asks for them.
"""

from __future__ import annotations

from sac_search.ready.timm_models import find_factory as find_timm
from sac_search.ready.transformers_models import find_factory as find_transformers
from sac_search.recipe import Library, parse_recipe
from sac_search.workload import Factory, load_factory

__all__ = ["find_factory"]


def find_factory(spec: str) -> Factory:
    """Returns the factory that `spec` names: a recipe's, or that of a file or module.

    Raises:
        UsageError: no such file, module, factory or model, or a setting that it cannot have.
        WorkloadError: importing the file raised, or a library is not installed.
    """
    recipe = parse_recipe(spec)
    if recipe is None:
        return load_factory(spec)
    if recipe.library is Library.HF:
        return find_transformers(recipe)
    return find_timm(recipe)
