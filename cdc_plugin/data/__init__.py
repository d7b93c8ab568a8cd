"""Open images from any source as one square uint8 array, data sets by name, and make the views of a sample."""

from cdc_plugin.data.decode import UnreadableImageError
from cdc_plugin.data.images import ImageSet, native_size, open_images
from cdc_plugin.data.sources.base import ImageSource
from cdc_plugin.data.sources.named import NamedDataset, datasets

__all__ = ["ImageSet", "ImageSource", "NamedDataset", "UnreadableImageError", "datasets", "native_size", "open_images"]
