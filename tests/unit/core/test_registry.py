import pytest

from cdc_plugin.core.registry import Registry
from cdc_plugin.errors import UserError


class EntryPoint:
    def __init__(self, name: str, value: object) -> None:
        self.name, self.value = name, value

    def load(self) -> object:
        return self.value


def test_what_is_registered_is_found_by_name_in_sorted_order():
    registry: Registry[int] = Registry("number")
    registry.register("two")(2)
    registry.register("one")(1)
    assert registry.get("two") == 2
    assert registry.names() == ["one", "two"]
    assert "one" in registry
    assert "three" not in registry


def test_the_decorator_hands_the_object_back():
    registry: Registry = Registry("function")

    @registry.register("double")
    def double(x: int) -> int:
        return 2 * x

    assert double(2) == registry.get("double")(2) == 4


def test_a_typo_names_the_nearest_and_all_known_names():
    registry: Registry[int] = Registry("number")
    registry.register("seven")(7)
    registry.register("nine")(9)
    with pytest.raises(UserError, match=r"unknown number 'sevn'; did you mean 'seven'\? \(known: nine, seven\)"):
        registry.get("sevn")
    with pytest.raises(UserError, match=r"unknown number 'xyz' \(known"):
        registry.get("xyz")


def test_a_name_cannot_be_taken_twice():
    registry: Registry[int] = Registry("number")
    registry.register("one")(1)
    with pytest.raises(ValueError, match="registered twice"):
        registry.register("one")(11)


def test_other_packages_add_entries_but_replace_none(monkeypatch):
    asked = []

    def entry_points(group: str) -> list[EntryPoint]:
        asked.append(group)
        return [EntryPoint("one", 111), EntryPoint("two", 2)]

    monkeypatch.setattr("cdc_plugin.core.registry.entry_points", entry_points)
    registry: Registry[int] = Registry("lucky number")
    registry.register("one")(1)
    assert registry.get("two") == 2
    assert registry.get("one") == 1
    assert asked == ["cdc_plugin.lucky_number"]
