"""The run that all faults disturb, and its undisturbed result."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.fault_runs import QUICK, assert_same_results, refine, resume


@dataclass(frozen=True)
class Case:
    """Arguments of a run without --out, and the folder of the undisturbed run."""

    words: list[str]
    whole: Path

    def check(self, folder: Path) -> None:
        """Resume a disturbed run to its end, which must equal that of the undisturbed one."""
        resume(folder, self.words)
        assert_same_results(folder, self.whole)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory, digits, tiny_checkpoint) -> Case:
    folder = tmp_path_factory.mktemp("undisturbed")
    np.savez(folder / "digits.npz", x=digits[0], y=digits[1])
    words = ["--backbone", str(tiny_checkpoint), "--data", str(folder / "digits.npz"), *QUICK]
    ended = refine(*words, "--out", folder / "out")
    assert ended.code == 0, ended.errors
    return Case(words, folder / "out")
