"""The decoders whose results are cached: a row for each function or method, with what it decodes.

NOTE [ Decoders ]
    What a decoder returns for the same bytes and arguments is the same, whatever the program around it draws. So the key of a
    result is the decoder, the version of its library, its arguments and the content: nothing is stale, and equal files are one
    entry. Only if there are no bytes at hand (HDF5, GDAL) a file stands for them, by its number, size and times.

    A decoder is looked at if its library is imported and its arguments are plain values. To add one, add a row: the module, the
    name, and, if the first argument is not what it decodes, a function that returns the request for a call, or None.
"""

import os
import struct
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from stocache.datasets.decoders.content import Content, content_of, is_plain, nbytes_of, of_file, of_stream, text_of
from stocache.datasets.decoders.pillow import PillowCall


class Call:
    """A call of a decoder.

    Attributes:
        content: what it decodes.
        text: its arguments.
        copies: whether the caller gets what is cached, so that it must be a copy.
    """

    copies = True

    def __init__(self, content: Content, *arguments: Any) -> None:
        self.content, self.text = content, text_of((content.suffix, *arguments))

    def nbytes(self, value: Any) -> int:
        """Return about how many bytes a result takes; 0 if it is not cached."""
        return nbytes_of(value) if value is not None and is_plain(value, fixed=True) else 0

    def result(self, value: Any) -> Any:
        """Return what is cached of a plain result."""
        position = None if self.content.stream is None else self.content.stream.tell()
        return value, position, isinstance(value, np.ndarray) and not value.flags.writeable

    def apply(self, cached: Any) -> Any:
        """Return the result that was cached, after what else the decoder does."""
        value, position, is_fixed = cached
        if position is not None:
            self.content.stream.seek(position)
        if is_fixed:
            value.flags.writeable = False
        return value


def _member(archive: Any, key: str) -> Call | None:
    """Of an ``.npz`` archive: the compressed bytes of the member."""
    info = archive.zip.getinfo(key if key in archive.zip.NameToInfo else f"{key}.npy")
    if not info.compress_type:
        return None
    head = of_stream(archive.zip.fp, info.header_offset, 30)
    size = 30 + sum(struct.unpack_from("<HH", head.data, 26)) + info.compress_size if head is not None else 0
    content = of_stream(archive.zip.fp, info.header_offset, size)
    return None if content is None else Call(content._replace(stream=None), info.compress_type, archive.allow_pickle)


def _rows_of_hdf5(dataset: Any, *args: Any, **kwargs: Any) -> Call | None:
    """Of a dataset in an HDF5 file that is open for reading: the file, and the name of the dataset."""
    file = dataset.file
    if file.mode != "r" or file.swmr_mode or file.driver != "sec2" or dataset.is_virtual or dataset.external:
        return None
    stands = of_file(os.fstat(file.id.get_vfd_handle()))
    return None if stands is None else Call(Content(stands), dataset.name, args, sorted(kwargs.items()))


_seen: "weakref.WeakKeyDictionary[Any, bytes]" = weakref.WeakKeyDictionary()  # files as they were when they were first read


def _raster(dataset: Any, *args: Any, **kwargs: Any) -> Call | None:
    """Of a raster that is open for reading: the file, as it was when it was first read."""
    stands = of_file(os.stat(dataset.name))
    if stands is None or dataset.mode != "r" or _seen.setdefault(dataset, stands) != stands:
        return None
    return Call(Content(stands), args, sorted(kwargs.items()))


def _volume(proxy: Any, *args: Any, **kwargs: Any) -> Call | None:
    """Of a volume of nibabel: the file, and where its numbers lie."""
    content = content_of(proxy.file_like)
    layout = proxy.offset, proxy.shape, proxy.dtype, float(proxy.slope), float(proxy.inter), proxy.order
    return None if content is None else Call(content, type(proxy), layout, args, sorted(kwargs.items()))


def _pixels(decoder: Any, source: Any, **kwargs: Any) -> Call | None:
    """Of a DICOM image: its bytes, and the values that say how they are decoded."""
    values = [(str(each.tag), str(each.value)) for each in source.group_dataset(0x0028)]
    return Call(Content(source.PixelData), str(decoder.UID), values, sorted(kwargs.items()))


class Decoder(NamedTuple):
    """A function or method whose results are cached.

    Attributes:
        module: where it is; it may be imported later.
        name: in the module, or of a class in it.
        call: returns the request for its arguments; None, or an error, if a call is not cached.
        shown: its library, for the user.
    """

    module: str
    name: str
    call: Callable[..., Any]
    shown: str

    @property
    def version(self) -> str:
        """The version of its library."""
        return str(getattr(sys.modules[self.module.partition(".")[0]], "__version__", ""))


def _by(argument: str) -> Callable[..., Call | None]:
    """Return a function that returns the request of a call whose first argument, of that name, is the source."""

    def request(*args: Any, **kwargs: Any) -> Call | None:
        source, *others = args or (kwargs.pop(argument),)
        content = content_of(source)
        return None if content is None else Call(content, others, sorted(kwargs.items()))

    return request


DECODERS: tuple[Decoder, ...] = (
    Decoder("PIL.ImageFile", "ImageFile.load", PillowCall.of, "Pillow"),
    Decoder("PIL.TiffImagePlugin", "TiffImageFile.load", PillowCall.of, "Pillow"),
    Decoder("cv2", "imread", _by("filename"), "OpenCV"),
    Decoder("cv2", "imdecode", _by("buf"), "OpenCV"),
    Decoder("torchvision.io.image", "decode_image", _by("input"), "torchvision"),
    Decoder("torchvision.io.image", "decode_jpeg", _by("input"), "torchvision"),
    Decoder("torchvision.io.image", "decode_png", _by("input"), "torchvision"),
    Decoder("torchvision.io.image", "decode_webp", _by("input"), "torchvision"),
    Decoder("torchvision.io.image", "read_image", _by("path"), "torchvision"),
    Decoder("numpy.lib.npyio", "NpzFile.__getitem__", _member, "numpy"),
    Decoder("numpy", "loadtxt", _by("fname"), "numpy"),
    Decoder("numpy", "genfromtxt", _by("fname"), "numpy"),
    Decoder("soundfile", "read", _by("file"), "soundfile"),
    Decoder("torchaudio", "load", _by("uri"), "torchaudio"),
    Decoder("scipy.io.wavfile", "read", _by("filename"), "scipy"),
    Decoder("scipy.io", "loadmat", _by("file_name"), "scipy"),
    Decoder("librosa", "load", _by("path"), "librosa"),
    Decoder("nibabel.arrayproxy", "ArrayProxy.__array__", _volume, "nibabel"),
    Decoder("nibabel.arrayproxy", "ArrayProxy.__getitem__", _volume, "nibabel"),
    Decoder("pydicom.pixels.decoders.base", "Decoder.as_array", _pixels, "pydicom"),
    Decoder("imageio.v3", "imread", _by("uri"), "imageio"),
    Decoder("skimage.io", "imread", _by("fname"), "skimage"),
    Decoder("tifffile", "imread", _by("files"), "tifffile"),
    Decoder("rasterio.io", "DatasetReader.read", _raster, "rasterio"),
    Decoder("h5py", "Dataset.__getitem__", _rows_of_hdf5, "h5py"),
)
