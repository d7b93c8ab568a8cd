"""``python -m cdc_plugin`` is ``cdc-refine``."""

from cdc_plugin.cli import refine_command

if __name__ == "__main__":
    refine_command()
