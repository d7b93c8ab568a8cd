"""Find out what a run is asked to do; torch is imported only where a backbone is named."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cdc_plugin.config.load import load_config
from cdc_plugin.config.schema import RefineConfig


def configure(
    recipe: str | Path | None = None, flags: Mapping[str, Any] | None = None, overrides: Sequence[str] = ()
) -> RefineConfig:
    """Return what is asked for; what the pretraining run says of its data yields to what the user says."""
    request: RefineConfig = load_config(recipe, flags, overrides)
    if request.features:
        request.freeze_backbone = True
    if request.backbone is None or request.features:
        return request
    from cdc_plugin.checkpoints.read import read_run_args

    content, folder = read_run_args(request.backbone)
    if content is None:
        return request
    from cdc_plugin.checkpoints.formats.solo_learn.args import infer_settings

    return load_config(recipe, flags, overrides, infer_settings(content, folder))
