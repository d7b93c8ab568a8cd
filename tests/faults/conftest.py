"""The run that all faults happen to, and what it gives undisturbed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.fault_runs import QUICK, assert_same_results, refine, resume


@dataclass(frozen=True)
class Case:
    """Words of a run but for --out, and the folder of that run when nothing happened."""

    words: list[str]
    whole: Path

    def check(self, folder: Path) -> None:
        """Go on with a disturbed run to its end, which must be that of the undisturbed one."""
        resume(folder, self.words)
        assert_same_results(folder, self.whole)


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory, digits, tiny_checkpoint) -> Case:
    folder = tmp_path_factory.mktemp("undisturbed")
    np.savez(folder / "digits.npz", x=digits[0], y=digits[1])
    words = ["--backbone", str(tiny_checkpoint), "--data", str(folder / "digits.npz"), *QUICK]
    ended = refine(*words, "--out", folder / "out")
    assert ended.code == 0, ended.errors
    return Case(words, folder / "out")
