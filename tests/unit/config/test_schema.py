import pytest

from cdc_plugin.config.schema import RefineConfig, list_settings, settings_table
from cdc_plugin.training.pretext.config import PretrainConfig
from tests.helpers import ROOT


def test_the_readme_shows_the_settings_as_the_schema_has_them():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    _, rest = readme.split("<!-- settings -->\n")
    table, _ = rest.split("\n<!-- end of settings -->")
    assert table == settings_table()


@pytest.mark.parametrize("schema", [RefineConfig, PretrainConfig])
def test_every_setting_has_a_help_and_every_number_or_name_says_what_stands_for_none(schema):
    for name, item in list_settings(schema).items():
        assert item.metadata["help"] or name == "from_recipe"
        assert "\n" not in item.metadata["help"]
        assert "|" not in item.metadata["help"] + item.metadata["auto"], "would break the Markdown table"
