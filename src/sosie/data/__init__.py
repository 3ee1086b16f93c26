"""Images to show to networks: a demo set that is shipped, named sets, files, folders, your own; also changed ones."""

from .attacks import ATTACKS, Attack, attack
from .corruptions import CORRUPTIONS, Corruption, corrupt
from .images import Batches, ImageData
from .readers import ImageFolder
from .specification import DataPart, list_data, open_data, open_images
