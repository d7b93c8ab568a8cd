"""What is refused before training; the rest of the preparation is tested by whole runs."""

import pytest

from cdc_plugin.config.resolve import ResolvedConfig
from cdc_plugin.errors import ConfigError
from cdc_plugin.training.prepare import check_processes


def test_more_processes_than_images_in_a_sub_batch_or_than_a_compiled_network_allows_are_refused():
    check_processes(ResolvedConfig(sub_batch_size=12), 6)
    with pytest.raises(ConfigError, match=r"sub_batch_size=12 .*7 processes.*sub_batch_size=28"):
        check_processes(ResolvedConfig(sub_batch_size=12), 7)
    check_processes(ResolvedConfig(sub_batch_size=28), 7)
    # The main process alone trains the heads of a frozen backbone.
    check_processes(ResolvedConfig(sub_batch_size=12, freeze_backbone=True), 7)
    # Compiled networks cannot share statistics.
    settings = ResolvedConfig(sub_batch_size=12, compile=True, sync_batchnorm=True)
    check_processes(settings, 1)
    with pytest.raises(ConfigError, match="sync_batchnorm=false"):
        check_processes(settings, 2)
