"""What every JSON file of the package has in common: it follows report.schema.json, and its keys are identifiers."""

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema

from tests.helpers import ROOT

METRICS = {"ACC", "NMI", "ARI", "CONF", "ECE", "AECE", "CECE", "BRIER", "NLL", "AUROC", "AURC", "FPR95", "AUPR"}


@functools.cache
def _validators() -> dict[str, jsonschema.Draft202012Validator]:
    """Return a validator for each kind: an error in one kind is easier to read than "matches none of them"."""
    schema = json.loads((ROOT / "cdc_plugin" / "report" / "report.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    kinds = [entry["$ref"].rsplit("/", 1)[1] for entry in schema["oneOf"]]
    return {
        kind: jsonschema.Draft202012Validator({"$defs": schema["$defs"], "$ref": f"#/$defs/{kind}"}) for kind in kinds
    }


def check_record(record: dict[str, Any], kind: str) -> None:
    """Fail where a record is not of this kind, or has a key that is no identifier; numbers must be finite."""
    json.dumps(record, allow_nan=False)
    assert record["kind"] == kind
    _validators()[kind].validate(record)
    wrong = {key for key in _keys(record) if key not in METRICS and not re.fullmatch(r"[a-z][a-z0-9_]*", key)}
    assert not wrong, f"keys that are no identifiers: {sorted(wrong)}"


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
        for inner in value.values():
            yield from _keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner)
