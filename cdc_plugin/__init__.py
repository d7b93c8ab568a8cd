"""Calibrated clusters from any self-supervised image backbone, without labels.

The names below are the public interface; they are imported when first used, so that ``import cdc_plugin``
costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdc_plugin.checkpoints.load import load_backbone as load_backbone
    from cdc_plugin.checkpoints.load_model import load_model as load_model
    from cdc_plugin.comparison.run import compare_methods as compare_methods
    from cdc_plugin.config.schema import AugmentConfig as AugmentConfig
    from cdc_plugin.config.schema import RefineConfig as RefineConfig
    from cdc_plugin.errors import CheckpointError as CheckpointError
    from cdc_plugin.errors import ConfigError as ConfigError
    from cdc_plugin.errors import DataError as DataError
    from cdc_plugin.errors import OutputError as OutputError
    from cdc_plugin.errors import UserError as UserError
    from cdc_plugin.evaluation.evaluate import compare as compare
    from cdc_plugin.evaluation.evaluate import compare as compare_models  # noqa: F401
    from cdc_plugin.evaluation.evaluate import evaluate as evaluate
    from cdc_plugin.evaluation.inspect import inspect as inspect
    from cdc_plugin.evaluation.records import Report as Report
    from cdc_plugin.integrations.export import export_model as export_model
    from cdc_plugin.integrations.hub.model import CalibratedClusterer as CalibratedClusterer
    from cdc_plugin.models.backbone import Backbone as Backbone
    from cdc_plugin.models.clusterer import Clusterer as Clusterer
    from cdc_plugin.pipeline import refine as refine

__version__ = "0.1.0"

_HOMES = {
    "AugmentConfig": "config.schema",
    "Backbone": "models.backbone",
    "CalibratedClusterer": "integrations.hub.model",
    "CheckpointError": "errors",
    "Clusterer": "models.clusterer",
    "ConfigError": "errors",
    "DataError": "errors",
    "OutputError": "errors",
    "RefineConfig": "config.schema",
    "Report": "evaluation.records",
    "UserError": "errors",
    "compare": "evaluation.evaluate",
    "compare_methods": "comparison.run",
    "compare_models": "evaluation.evaluate",
    "evaluate": "evaluation.evaluate",
    "export_model": "integrations.export",
    "inspect": "evaluation.inspect",
    "load_backbone": "checkpoints.load",
    "load_model": "checkpoints.load_model",
    "refine": "pipeline",
}
_ALIASES = {"compare_models": "compare"}  # beside compare_methods, the name that says what is compared
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cdc_plugin' has no attribute {name!r}")
    return getattr(import_module(f"cdc_plugin.{_HOMES[name]}"), _ALIASES.get(name, name))


def __dir__() -> list[str]:
    return sorted(__all__)
