"""Images for networks: the demo set, named sets, files, folders and your own; corruptions and attacks."""

from .corruptions import CORRUPTIONS, Corruption, corrupt
from .images import DataBatches, ImageData, ImageFolder
from .shifts import ATTACKS, Attack, attack
from .specification import DataPart, list_data, open_data, open_images
