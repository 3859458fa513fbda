"""Decode images of Pillow once: at ``ImageFile.load``, so that an image stays what ``Image.open`` has made."""

import sys
from typing import Any

import numpy as np

from stocache.datasets.decoders.content import Content, of_stream, text_of

_MODES = {"1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I", "F", "I;16"}
_FORMATS = {"JPEG", "PNG", "BMP", "PPM", "TIFF"}  # whose load is the one of ImageFile, and decodes one frame
_ORIENTATION = 274
_USED = "fp", "decoderconfig", "load_prepare", "load_end", "_exclusive_fp", "_close_exclusive_fp_after_loading"


class PillowCall:
    """A call of ``load``; as `Call`. A hit does all that ``load`` does but decoding: it reads the texts behind the pixels."""

    copies = False

    def __init__(self, image: Any, content: Content) -> None:
        module, files = sys.modules["PIL.Image"], sys.modules["PIL.ImageFile"]
        self._image, self.content, self._base, self._before = image, content, module.Image, (image.mode, image.size)
        tiles = [(tile[0], tuple(tile[1]), tile[2], tile[3]) for tile in image.tile]
        self.text = text_of([image.format, *self._before, image.decoderconfig, tiles, files.LOAD_TRUNCATED_IMAGES])

    @classmethod
    def of(cls, image: Any) -> "PillowCall | None":
        """Return the call for an image; None if it is loaded, or of a different format or mode, or of several frames."""
        loaded = vars(image).get("_im", vars(image).get("im"))
        if not image.tile or loaded is not None or image.format not in _FORMATS or image.mode not in _MODES:
            return None
        if not type(image).__module__.startswith("PIL.") or image.tile[0][0] == "raw" or hasattr(image, "tile_prefix"):
            return None
        if image.format == "TIFF" and _ORIENTATION in image.tag_v2:  # its pixels are turned after they are decoded
            return None
        if getattr(image, "is_animated", False) or not all(hasattr(image, name) for name in _USED):
            return None
        content = of_stream(image.fp, 0)
        return None if content is None else cls(image, content._replace(stream=None))

    def nbytes(self, value: Any) -> int:
        """Return how many bytes the pixels take; 0 if the image is not what it was."""
        image = self._image
        return image.width * image.height * len(image.getbands()) if (image.mode, image.size) == self._before else 0

    def result(self, value: Any) -> Any:
        """Return the pixels of the image that is loaded now."""
        image = self._image
        return np.frombuffer(image.tobytes("raw", image.mode), np.uint8)

    def apply(self, cached: Any) -> Any:
        """Give the image its pixels, and do the rest of what ``load`` does."""
        image, tile = self._image, self._image.tile[0]
        module = sys.modules["PIL.Image"]
        image.im = module.frombytes(image.mode, image.size, cached, "raw", image.mode).im
        image.load_prepare()
        if not hasattr(image, "load_seek"):
            image.fp.seek(tile[2])
        image.tile, image.readonly, image.map = [], 0, None
        image.load_end()
        closes = image._exclusive_fp and image._close_exclusive_fp_after_loading
        if closes:
            image.fp.close()
        if closes or not getattr(image, "use_load_libtiff", False):
            image.fp = None
        return self._base.load(image)
