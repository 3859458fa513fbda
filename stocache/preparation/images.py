"""Image files as tensors (needs Pillow)."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def load_jpeg(path: Path, size: int) -> Tensor:
    """Return a photo as a uint8 tensor of shape (3, size, size)."""
    from PIL import Image

    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())
