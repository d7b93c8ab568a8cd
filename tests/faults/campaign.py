"""Disturb runs by random faults and resume them until they are done: ``campaign.py --faults 100``.

Prints a table, and writes it as JSON with ``--json FILE``; exits with code 1 if any result differs.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from tests.helpers.fault_runs import QUICK, Ended, Fault, Started, assert_same_results, count_epochs, refine  # noqa: E402

SIGNALS = {"kill -9": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT, "SIGUSR1": signal.SIGUSR1}
DISK = ("torch:save", "os:fsync", "os:replace", "tempfile:mkstemp")
EXPECTED = {"kill -9": -9, "killed in a write": -9, "SIGTERM": 143, "SIGINT": 130, "SIGUSR1": 128 + signal.SIGUSR1}
EXPECTED["full disk"] = 2


def disturb(kind: str, words: list[str], seconds: float, chance: random.Random) -> Ended:
    """Start a run with a fault at a random moment."""
    if kind == "full disk":
        return refine(*words, fault=Fault(chance.choice(DISK), "fill-disk", call=chance.randint(1, 12)))
    if kind == "killed in a write":
        return refine(*words, fault=Fault("torch:save", "half-kill", call=chance.randint(1, 4)))
    started = Started(words)
    time.sleep(chance.random() * seconds)
    started.send(SIGNALS[kind])
    return started.end()


def prepare(folder: Path) -> tuple[list[str], Path, float]:
    """Return the arguments of a run, its undisturbed folder, and how many seconds it takes."""
    import torch

    from cdc_plugin.data.images import open_images
    from cdc_plugin.models.architectures import build

    found = open_images("digits", 32)
    np.savez(folder / "digits.npz", x=np.asarray(found.images[:200]), y=found.labels[:200])
    spec = {"family": "resnet", "block": "basic", "depths": [1] * 4, "widths": [8] * 4}
    spec["stem"] = {"kernel": 3, "stride": 1, "padding": 1, "pool": True}
    torch.manual_seed(0)
    torch.save(build(spec)[0].state_dict(), folder / "tiny.pt")
    words = ["--backbone", str(folder / "tiny.pt"), "--data", str(folder / "digits.npz"), *QUICK]
    refine("--version")  # starts the server that the others are forked from
    began = time.monotonic()
    ended = refine(*words, "--out", folder / "whole")
    assert ended.code == 0, ended.errors
    return words, folder / "whole", time.monotonic() - began


def campaign(faults: int, seed: int) -> dict[str, object]:
    chance = random.Random(seed)
    happened, too_late, wrong = Counter[str](), Counter[str](), []
    with tempfile.TemporaryDirectory(prefix="campaign-") as name:
        words, whole, seconds = prepare(Path(name))
        done = runs = 0
        while done < faults:
            out, runs, last = Path(name) / f"run-{runs}", runs + 1, 0
            story: list[str] = []
            for _ in range(min(chance.randint(1, 4), faults - done)):  # several faults may hit the same run
                kind, done = chance.choice(list(EXPECTED)), done + 1
                ended = disturb(kind, [*words, "--resume", "--out", str(out)], seconds, chance)
                story.append(f"{kind}: {ended.code}")
                (happened if ended.code else too_late)[kind] += 1
                # Before the command handles signals, one kills it, as any program.
                early = {-SIGNALS[kind]} if kind in SIGNALS else set()
                if ended.code not in {0, EXPECTED[kind]} | early or "Traceback" in ended.errors:
                    wrong.append({"story": list(story), "errors": ended.errors[-2000:]})
                if count_epochs(out) < last:
                    wrong.append({"story": list(story), "errors": f"epoch {last} was lost"})
                last = count_epochs(out)
            ended = refine(*words, "--resume", "--out", out)
            try:
                assert ended.code == 0, ended.errors[-2000:]
                assert_same_results(out, whole)
            except AssertionError as error:
                wrong.append({"story": story, "errors": str(error)})
    counts = {"happened": dict(happened), "came after the end": dict(too_late)}
    return {"seed": seed, "faults": faults, "runs": runs, **counts, "wrong": wrong}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    result = campaign(options.faults, options.seed)
    print(f"{'fault':20s}{'happened':>10s}{'too late':>10s}")
    for kind in EXPECTED:
        print(f"{kind:20s}{result['happened'].get(kind, 0):10d}{result['came after the end'].get(kind, 0):10d}")
    print(f"{result['faults']} faults in {result['runs']} runs (seed {result['seed']}): {len(result['wrong'])} wrong")
    for found in result["wrong"]:
        print(json.dumps(found))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    sys.exit(1 if result["wrong"] else 0)
