import pytest

from tests.helpers.trained_networks import smooth_images


@pytest.fixture(scope="session")
def images():
    return smooth_images()
