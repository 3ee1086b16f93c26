"""Images to show to networks: a demo set that is shipped, named sets, files, folders, your own; also changed ones."""

from .corruptions import CORRUPTIONS, Corruption, corrupt
from .images import ImageBatches, ImageData, ImageFolder
from .shifts import ATTACKS, Attack, attack
from .specification import DataPart, list_data, open_data, open_images
