import pytest

from cdc_plugin.core.registry import Registry
from cdc_plugin.errors import ConfigError


class EntryPoint:
    def __init__(self, name: str, value: object) -> None:
        self.name, self.value = name, value

    def load(self) -> object:
        return self.value


def test_a_typo_names_the_nearest_and_all_known_names():
    numbers = Registry("number", {"seven": 7, "nine": 9})
    with pytest.raises(ConfigError, match=r"unknown number 'sevn'; did you mean 'seven'\? \(known: nine, seven\)"):
        numbers.get("sevn")
    with pytest.raises(ConfigError, match=r"unknown number 'xyz' \(known"):
        numbers.get("xyz")


def test_other_packages_add_entries_but_replace_none(monkeypatch):
    groups = []

    def entry_points(group: str) -> list[EntryPoint]:
        groups.append(group)
        return [EntryPoint("one", 111), EntryPoint("two", 2)]

    monkeypatch.setattr("cdc_plugin.core.registry.entry_points", entry_points)
    numbers = Registry("lucky number", {"one": 1})
    assert numbers.get("two") == 2
    assert numbers.get("one") == 1
    assert groups == ["cdc_plugin.lucky_number"]
