"""The examples in docstrings give what they say."""

import doctest
import pkgutil
from importlib import import_module

import pytest

import cdc_plugin

MODULES = [module.name for module in pkgutil.walk_packages(cdc_plugin.__path__, "cdc_plugin.")]
# Whatever else is missing is a fault of the package.
OPTIONAL = {"datasets", "hydra", "lightly", "onnx", "onnxruntime", "pyarrow", "tensorboardX", "wandb"}


@pytest.mark.parametrize("name", ["cdc_plugin", *MODULES])
def test_examples_in_docstrings_run(name):
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"{error.name} is not installed")
    assert doctest.testmod(module).failed == 0
