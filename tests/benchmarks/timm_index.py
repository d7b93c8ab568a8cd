"""Write ``timm_index.json`` anew for the installed timm; takes some minutes: ``python tests/benchmarks/timm_index.py``.

With a pattern, as in ``... 'resnet*'``, nothing is written: it prints whether the shipped table has these models.
"""

import json
import sys

import timm

from cdc_plugin.checkpoints.formats.timm.index import TABLE, make_table
from cdc_plugin.models.architectures import skeleton


def main() -> None:
    pattern = sys.argv[1] if len(sys.argv) > 1 else ""
    names = timm.list_models(pattern)
    states = {}
    for number, name in enumerate(names, start=1):
        print(f"\r{number}/{len(names)} {name:60s}", end="", file=sys.stderr, flush=True)
        states[name] = skeleton({"family": "timm", "name": name, "kwargs": {}}).state_dict()
    print(file=sys.stderr)
    table = make_table(states)
    if pattern:
        shipped = json.loads(TABLE.read_text(encoding="utf-8"))
        lacking = [name for key, found in table.items() for name in found if name not in shipped.get(key, ())]
        print(f"{len(names)} models, not in the table: {', '.join(lacking) or 'none'}")
        return
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(found)}" for key, found in table.items())
    TABLE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    print(f"{len(names)} models of timm {timm.__version__}: {TABLE}")


if __name__ == "__main__":
    main()
