"""Recipes as Hydra configuration: ``+cdc=NAME`` once installed, or ``hydra.searchpath: [pkg://cdc_plugin.recipes]``."""
