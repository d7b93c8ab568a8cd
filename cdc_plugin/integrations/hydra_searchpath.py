"""Let every Hydra application find the recipes, as ``+cdc=NAME`` and ``hydra/callbacks=cdc_refine``.

The wheel puts this file into ``hydra_plugins``, the only package where Hydra looks for plug-ins (pyproject.toml).
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from cdc_plugin.config.recipes import recipe_folder


class RecipeSearchPath(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        # Last, so that groups of the application itself are never hidden.
        search_path.append(provider="cdc-plugin", path=f"file://{recipe_folder().parent}")
