"""Images to show to networks: a demo set that is shipped, named sets, files, folders, your own."""

from .folder import ImageFolder
from .images import Batches, ImageData
from .specification import list_data, open_data, open_images

__all__ = ["Batches", "ImageData", "ImageFolder", "list_data", "open_data", "open_images"]
