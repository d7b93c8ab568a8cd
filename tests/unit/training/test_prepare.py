"""What is refused before training; the rest of the preparation is tested by whole runs."""

from dataclasses import replace

import pytest

from cdc_plugin import UserError
from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.training.distributed import Distributed
from cdc_plugin.training.prepare import check_shares

CONFIG = RefineConfig(clusters=3)


def test_more_processes_than_images_in_a_sub_batch_are_refused():
    check_shares(replace(CONFIG, sub_batch_size=12), Distributed(0, 6))
    with pytest.raises(UserError, match=r"sub_batch_size=12 gives 7 processes .*sub_batch_size=28 and a batch_size"):
        check_shares(replace(CONFIG, sub_batch_size=12), Distributed(0, 7))
    check_shares(replace(CONFIG, sub_batch_size=28), Distributed(0, 7))
    # The heads of a frozen backbone are the main process's.
    check_shares(replace(CONFIG, sub_batch_size=12, freeze_backbone=True), Distributed(0, 7))
