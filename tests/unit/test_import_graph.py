"""That training is label-free is a property of the import graph: imports go down only."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "cdc_plugin"
LAYERS = [
    {"__main__", "cli_compare", "cli_evaluate", "cli_export", "cli_inspect", "cli_predict", "cli_pretrain"},
    {"cli", "integrations"},
    {"comparison", "prediction_parts"},
    {"pipeline", "planning", "assessment", "prediction", "pretrain_demo", "pretraining", "exports", "inspection"},
    {"answers", "audit", "preparation", "faults"},
    {"batches", "inputs", "report", "run_state"},
    {"references"},
    {"baselines", "engine", "evaluation", "augmentation", "initialisation"}
    | {"diagnosis", "guard", "quality", "hub", "outputs", "subjects"},
    {"clusterer", "hub_card", "features", "part_files"},
    {"data", "checkpoints", "tracking", "trackers", "results"},
    {"tables"},
    {"model", "heads", "runtime", "batchnorm"},
    {"exact", "parts"},
    {"core", "metrics", "selective"},
    {"world"},
    {"config", "registry", "demo"},
    {"errors", "process", "signals"},
]
LEVEL = {name: level for level, layer in enumerate(LAYERS) for name in layer}


def part_of(module: str) -> str:
    """``cdc_plugin.data.images`` is of part ``data``; names that the package itself offers count as none."""
    return module.split(".")[1] if "." in module else ""


def imports() -> dict[str, set[str]]:
    """{module: full names of all modules it imports}, at any depth of the code."""
    found: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        name = ".".join(("cdc_plugin", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        found[name] = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name} has a relative import"
                found[name] |= {node.module or ""}
                # ``from cdc_plugin.checkpoints import native`` imports a module, too.
                found[name] |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


GRAPH = imports()


def parts_reached(part: str) -> set[str]:
    reached: set[str] = set()
    waiting = {part}
    while waiting:
        current = waiting.pop()
        reached.add(current)
        targets = {t for name, ts in GRAPH.items() if part_of(name) == current for t in ts if t in GRAPH}
        waiting |= {part_of(target) for target in targets} - reached - {""}
    return reached - {part}


def test_every_module_has_a_place_in_the_layers():
    assert {part_of(name) for name in GRAPH} - {""} <= set(LEVEL)


@pytest.mark.parametrize("module", sorted(name for name in GRAPH if part_of(name)))
def test_imports_go_down_only(module):
    part = part_of(module)
    for target in GRAPH[module] & set(GRAPH):
        other = part_of(target)
        if other not in ("", part):
            assert LEVEL[other] > LEVEL[part], f"{module} imports {target}"


def test_the_engine_cannot_see_a_label_even_indirectly():
    forbidden = {"metrics", "evaluation", "data", "clusterer", "checkpoints", "augmentation", "pipeline"}
    assert not parts_reached("engine") & forbidden


def test_no_opponent_can_see_a_label_but_the_references_that_say_so():
    assert not parts_reached("baselines") & {"metrics", "evaluation", "data", "references", "pipeline"}
    seen_by = {part_of(name) for name, targets in GRAPH.items() if any(part_of(t) == "references" for t in targets)}
    assert seen_by - {"references"} <= {"comparison"}


def test_the_quality_card_cannot_see_a_label_measure():
    assert not parts_reached("quality") & {"metrics", "evaluation", "report", "pipeline"}


def test_metrics_import_nothing_of_the_package_but_its_error():
    assert parts_reached("metrics") <= {"errors"}


def test_the_mathematics_knows_neither_models_nor_files():
    assert parts_reached("core") <= {"errors", "registry"}


def test_only_the_command_line_prints_and_parses_arguments():
    for file in PACKAGE.rglob("*.py"):
        if file.name.startswith("cli") or file.name == "pretrain_demo.py":
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        assert not called & {"print", "exit", "quit", "input"}, file
    assert {name for name, targets in GRAPH.items() if "argparse" in targets} == {
        "cdc_plugin.cli",
        "cdc_plugin.cli_compare",
        "cdc_plugin.cli_evaluate",
        "cdc_plugin.cli_export",
        "cdc_plugin.cli_inspect",
        "cdc_plugin.cli_predict",
        "cdc_plugin.cli_pretrain",
        "cdc_plugin.pretrain_demo",
    }
