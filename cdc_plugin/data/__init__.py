"""Open images from any source as one square uint8 array, data sets by name, and the three views of a sample."""

from cdc_plugin.data.decode import UnreadableImageError
from cdc_plugin.data.images import ImageSet, native_size, open_images, storage_size
from cdc_plugin.data.sources.base import ImageSource
from cdc_plugin.data.sources.named import NamedDataset, datasets, find_data_root
from cdc_plugin.data.views import (
    OPERATIONS,
    Share,
    ViewSettings,
    make_views,
    plain_view,
    strong_view,
    weak_view,
)

__all__ = [
    "OPERATIONS",
    "ImageSet",
    "ImageSource",
    "NamedDataset",
    "Share",
    "UnreadableImageError",
    "ViewSettings",
    "datasets",
    "find_data_root",
    "make_views",
    "native_size",
    "open_images",
    "plain_view",
    "storage_size",
    "strong_view",
    "weak_view",
]
