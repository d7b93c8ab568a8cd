"""Callbacks of a pretraining with several processes: the first one refines by itself, and all of them end."""

import json

import pytest

from tests.helpers.torchrun import torchrun

LIGHTNING = """
import sys
import numpy as np
import pytorch_lightning
import torch
from cdc_plugin.integrations.lightning_callback import RefineAtEnd

class Pretraining(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        layers = torch.nn.Conv2d(3, 8, 3, 2), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1)
        self.backbone = torch.nn.Sequential(*layers)

    def training_step(self, batch, _):
        return self.backbone(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

squares = np.random.default_rng(0).integers(0, 60, (40, 8, 8, 3), dtype=np.uint8)
squares[::2] += 180
callback = RefineAtEnd(squares, 2, sys.argv[1], input_size=8, epochs=1, hidden=16, device="cpu")
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = pytorch_lightning.Trainer(
    max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", callbacks=[callback], **quiet
)
images = torch.from_numpy(squares).permute(0, 3, 1, 2).float() / 255
trainer.fit(Pretraining(), torch.utils.data.DataLoader(images, batch_size=10))
assert trainer.world_size == 2
total = torch.ones(1)
torch.distributed.all_reduce(total)  # the group of the pretraining is as it was
assert total == 2
assert (callback.report is not None) == trainer.is_global_zero
torch.distributed.destroy_process_group()
"""
HYDRA = """
import json, sys
from pathlib import Path
import torch
import torch.distributed as dist
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf
from cdc_plugin.integrations.hydra_callback import RefineWhenPretrained

home, backbone, data = sys.argv[1:]
dist.init_process_group("gloo")
callback = RefineWhenPretrained(["--data", data, "--clusters", "4", "--device", "cpu", "epochs=1", "hidden=16"])
config = OmegaConf.create({"method": "simclr", "name": "tiny", "checkpoint": {"dir": home}})
callback.on_job_start(config)
folder = Path(home, "simclr", "0")
if dist.get_rank() == 0:
    folder.mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps(OmegaConf.to_container(config)))
    (folder / "tiny.pth").write_bytes(Path(backbone).read_bytes())
dist.barrier()
callback.on_job_end(config, JobReturn(cfg=config, status=JobStatus.COMPLETED))
dist.destroy_process_group()
"""


def test_lightnings_callback_refines_in_the_first_of_several_processes(tmp_path):
    pytest.importorskip("pytorch_lightning")
    (tmp_path / "driver.py").write_text(LIGHTNING)
    result = torchrun(2, tmp_path / "driver.py", tmp_path / "out")
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["images"] == 40


def test_hydras_callback_refines_in_the_first_of_several_processes(tmp_path, tiny_checkpoint, archive):
    (tmp_path / "driver.py").write_text(HYDRA)
    result = torchrun(2, tmp_path / "driver.py", tmp_path / "trained", tiny_checkpoint, archive)
    assert result.returncode == 0, result.stderr[-3000:]
    written = list(tmp_path.glob("trained/simclr/0/cdc*/report.json"))
    assert len(written) == 1, result.stderr[-3000:]
