"""``hydra/callbacks=cdc_refine``: refine when solo-learn has pretrained, in a separate command that cannot harm it."""

import itertools
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from cdc_plugin.errors import OutputError, UserError, join_words

ARGS, RESULTS = "args.json", "cdc"
# Set by torchrun, Lightning and SLURM; any rank other than 0 means another process is the first.
RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")
# Of the pretraining's process group, which the refinement must not try to join, and of its restarts.
GROUP = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_RESTART_COUNT")
ELASTIC = "TORCHELASTIC_"  # what torchrun's own names begin with
CLOCK_SLACK = 2.0  # seconds by which the clock of a file system may differ


def find_run_folder(config: DictConfig, began: float) -> Path:
    """Return the folder that a run of solo-learn with this config has written since ``began``."""
    home = Path(OmegaConf.select(config, "checkpoint.dir", default="trained_models")) / str(config.get("method", ""))
    written = [path for path in home.glob(f"*/{ARGS}") if path.stat().st_mtime >= began - CLOCK_SLACK]
    if len(written) > 1:  # other runs have begun meanwhile
        own = {**json.loads(json.dumps(OmegaConf.to_container(config), default=str)), "wandb_run_id": None}
        stored = {path: json.loads(path.read_text(encoding="utf-8")) for path in written}
        written = [path for path, arguments in stored.items() if {**arguments, "wandb_run_id": None} == own]
    if len(written) == 1:
        return written[0].parent
    folders = ", ".join(str(path.parent) for path in written) or "none"
    raise OutputError(
        f"expected one run folder of this pretraining below {home}, found {folders}; "
        "solo-learn writes it with checkpoint.enabled=True, unless auto_resume found a run that was already complete"
    )


class RefineWhenPretrained(Callback):
    """Run ``cdc-refine --backbone RUN_FOLDER --out RUN_FOLDER/cdc`` and more ``options`` with the ``cdc`` node."""

    def __init__(self, options: Sequence[str] = ()) -> None:
        self.options = [str(option) for option in options]
        self.began = 0.0

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        self.began = time.time()

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if job_return.status is not JobStatus.COMPLETED or any(os.environ.get(name, "0") != "0" for name in RANKS):
            return
        log = logging.getLogger("cdc_plugin.hydra")
        # Hydra's logging disables all loggers that exist when a job begins.
        log.disabled = False
        try:
            # solo-learn fills its defaults into the config of the job, not into that of the callback.
            folder = find_run_folder(job_return.cfg or config, self.began)
        except (UserError, OSError, ValueError) as error:
            log.error("cdc-refine was not started, the pretraining is complete: %s", error)
            return
        # solo-learn may write several runs into one folder.
        names = itertools.chain([RESULTS], (f"{RESULTS}-{number}" for number in itertools.count(2)))
        results = next(folder / name for name in names if not (folder / name).exists())
        arguments = ["--backbone", str(folder), "--out", str(results), *self.options]
        left_out = {*RANKS, *GROUP, *(name for name in os.environ if name.startswith(ELASTIC))}
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        code = subprocess.run([sys.executable, "-m", "cdc_plugin", *arguments], env=environment, check=False).returncode
        if code:
            message = "cdc-refine ended with exit code %d; the pretraining in %s is complete. To try again: %s"
            log.error(message, code, folder, join_words(["cdc-refine", *arguments]))
