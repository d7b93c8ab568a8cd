"""``hydra/callbacks=cdc_refine``: the stage begins when a pretraining run of solo-learn has ended.

It runs as a command of its own, so that nothing that happens there can harm the pretraining.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from cdc_plugin.errors import UserError

ARGS, RESULTS = "args.json", "cdc"
# Set by torchrun, Lightning and SLURM; any rank other than 0 means another process is the first.
RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")
# Of the pretraining's process group: the stage must not try to join it.
GROUP = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
CLOCK_SLACK = 2.0  # seconds by which the clock of a file system may differ


def find_run_folder(config: DictConfig, began: float) -> Path:
    """The folder that a run of solo-learn with this config has written since ``began``."""
    home = Path(OmegaConf.select(config, "checkpoint.dir", default="trained_models")) / str(config.get("method", ""))
    written = [path for path in home.glob(f"*/{ARGS}") if path.stat().st_mtime >= began - CLOCK_SLACK]
    if len(written) > 1:  # other runs have begun meanwhile
        own = json.loads(json.dumps(OmegaConf.to_container(config), default=str))
        written = [path for path in written if _without_run_id(path) == own]
    if len(written) == 1:
        return written[0].parent
    found = ", ".join(str(path.parent) for path in written) or "none"
    raise UserError(
        f"expected one run folder of this pretraining below {home}, found {found}; "
        "solo-learn writes it with checkpoint.enabled=True, unless auto_resume found a run that was already complete"
    )


def results_folder(run_folder: Path) -> Path:
    """``cdc`` in the run folder, or the next free name: solo-learn may write several runs into one folder."""
    names = itertools.chain([RESULTS], (f"{RESULTS}-{number}" for number in itertools.count(2)))
    return next(run_folder / name for name in names if not (run_folder / name).exists())


def _without_run_id(path: Path) -> Any:
    stated = json.loads(path.read_text(encoding="utf-8"))
    stated.pop("wandb_run_id", None)
    return stated


class RefineWhenPretrained(Callback):
    """Runs ``cdc-refine --backbone RUN_FOLDER --out RUN_FOLDER/cdc``; settings are those of the ``cdc`` node.

    Args:
        options: more words for its command line.
    """

    def __init__(self, options: Sequence[str] = ()) -> None:
        self.options = [str(word) for word in options]
        self.began = 0.0

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        self.began = time.time()

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if job_return.status is not JobStatus.COMPLETED or any(os.environ.get(name, "0") != "0" for name in RANKS):
            return
        log = logging.getLogger("cdc_plugin.hydra")
        # Hydra's logging disables all loggers that are there when a job begins.
        log.disabled = False
        try:
            # solo-learn fills its defaults into the config of the job, not into that of the callback.
            folder = find_run_folder(job_return.cfg or config, self.began)
        except (UserError, OSError, ValueError) as error:
            log.error("cdc-refine was not started, the pretraining is complete: %s", error)
            return
        words = ["--backbone", str(folder), "--out", str(results_folder(folder)), *self.options]
        environment = {name: value for name, value in os.environ.items() if name not in (*RANKS, *GROUP)}
        code = subprocess.run([sys.executable, "-m", "cdc_plugin", *words], env=environment, check=False).returncode
        if code:
            log.error(
                "cdc-refine ended with exit code %d; the pretraining in %s is complete. To try again: %s",
                code,
                folder,
                shlex.join(["cdc-refine", *words]),
            )
