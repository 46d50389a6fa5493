"""Model families, one file each, found by `model_type`; the folders beside them hold bundled weights."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from boleinfer.config import ConfigError
from boleinfer.supported import SUPPORTED


def family(model_type: str) -> ModuleType:
    """The module of a normalised model_type (ModelConfig.model_type); raises ConfigError for any other name."""
    if model_type not in SUPPORTED:
        raise ConfigError(f"no model family {model_type!r}; supported: {', '.join(SUPPORTED)}")
    return import_module(f"boleinfer.models.{model_type.removesuffix('_text')}")
