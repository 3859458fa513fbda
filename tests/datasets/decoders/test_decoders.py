"""What decoders of libraries return for the same content comes from memory, equal to what they return without it."""

import contextlib
import errno
import io
import os
import pickle
import random
import signal
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from stocache import CachedDataset, cached_decoders
from stocache.datasets.decoders import cache, patches
from stocache.datasets.decoders.table import DECODERS
from stocache.system.describe import describe
from tests.support.epochs import difference_of, epochs
from tests.support.images import Made

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.filterwarnings("ignore")
PIXELS = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)


@pytest.fixture(autouse=True)
def _everything_pays(monkeypatch):
    """Cache whatever a decoder returns, and look at all calls: files of tests are small."""
    monkeypatch.setattr(cache, "_WORTH", 0)
    monkeypatch.setattr(cache, "_in_vain", [0] * len(DECODERS))
    monkeypatch.setattr(cache, "_looks", [cache._LOOKS] * len(DECODERS))
    yield
    assert not patches._placed, "functions of libraries are still replaced"


def image(folder, name="a.jpg", pixels=PIXELS, **options):
    Image.fromarray(pixels).save(folder / name, **options)
    return str(folder / name)


def images(folder, count, ending="jpg"):
    return [image(folder, f"{number}.{ending}", np.roll(PIXELS, number, 0)) for number in range(count)]


def looked_at(path):
    """Return all that users read of an image, after it is loaded."""
    picture = Image.open(path)
    picture.load()
    its = {name: getattr(picture, name) for name in ("mode", "size", "format", "info", "readonly", "fp", "tile")}
    its |= {"class": type(picture), "text": getattr(picture, "text", None), "exif": dict(picture.getexif())}
    return its, picture.getpalette(), np.asarray(picture).tobytes(), picture.tobytes()


def twice(function, *args, **kwargs):
    """Return how often a decoder is served. All results must be equal, and the caller's own."""
    plain = function(*args, **kwargs)
    with cached_decoders("64MB", audit=0) as decoders:
        first, second, third = (function(*args, **kwargs) for _ in range(3))
        hits = sum(hits for _, hits in decoders.stats().values())
    for each in (first, second, third):
        assert describe(each) == describe(plain)
    if isinstance(third, np.ndarray) and plain.flags.writeable:
        third[...] = 0
        assert describe(second) == describe(plain)
    return hits


EXIF = Image.Exif()
EXIF[274], EXIF[271] = 6, "camera"
TEXT = pytest.importorskip("PIL.PngImagePlugin").PngInfo()
TEXT.add_text("before", "pixels")
PICTURES = {
    "grey": ("a.jpg", PIXELS[..., 0], {}), "exif": ("a.jpg", PIXELS, {"exif": EXIF}),
    "text": ("a.png", PIXELS, {"pnginfo": TEXT}), "16 bits": ("a.png", PIXELS[..., 0].astype(np.uint16) * 257, {}),
    "alpha": ("a.png", np.dstack([PIXELS, PIXELS[..., :1]]), {}), "bmp": ("a.bmp", PIXELS, {}),
    "tiff": ("a.tiff", PIXELS, {"compression": "tiff_lzw"}),
    "turned": ("a.tiff", PIXELS, {"exif": EXIF}), "gif": ("a.gif", PIXELS[..., 0], {}), "webp": ("a.webp", PIXELS, {}),
}  # fmt: skip
SERVED = {"grey", "exif", "text", "16 bits", "alpha", "tiff"}


@pytest.mark.parametrize("kind", PICTURES)
def test_an_image_is_what_pillow_makes_of_it(kind, tmp_path):
    name, pixels, options = PICTURES[kind]
    path = image(tmp_path, name, pixels, **options)
    assert bool(twice(looked_at, path)) == (kind in SERVED)


def drafted(path):
    picture = Image.open(path)
    picture.draft("L", (20, 20))
    return picture.size, picture.mode, np.asarray(picture).copy()


def from_bytes(path):
    stream = io.BytesIO(Path(path).read_bytes())
    picture = Image.open(stream)
    picture.load()
    return picture.tobytes(), stream.closed


@pytest.mark.parametrize("way", [drafted, from_bytes])
def test_pillow_is_served_however_an_image_is_read(way, tmp_path):
    assert twice(way, image(tmp_path))


def test_an_image_with_a_palette_is_served(tmp_path):
    Image.fromarray(PIXELS).quantize(16).save(tmp_path / "p.png", transparency=3)
    assert twice(looked_at, str(tmp_path / "p.png"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write a file of each format; return their path without an ending."""
    at = tmp_path_factory.mktemp("files") / "a"
    volume = np.random.default_rng(1).random((4, 5, 6)).astype(np.float32)
    for ending in (".jpg", ".tiff"):
        image(at.parent, f"a{ending}")
    np.savetxt(f"{at}.txt", volume[0])
    np.savez_compressed(f"{at}.npz", volume=volume)
    with contextlib.suppress(ImportError):
        from scipy.io import savemat, wavfile

        savemat(f"{at}.mat", {"volume": volume})
        wavfile.write(f"{at}.wav", 8000, (volume.ravel() * 9999).astype(np.int16))
    with contextlib.suppress(ImportError):
        import nibabel

        nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), f"{at}.nii.gz")
    with contextlib.suppress(ImportError):
        import h5py

        with h5py.File(f"{at}.h5", "w") as file:
            file.create_dataset("rows", data=volume, chunks=True, compression="gzip")
    for path in at.parent.iterdir():
        os.utime(path, (1, 1))  # one that was written just now is not known by its time
    return at


@pytest.mark.parametrize(("library", "read"), [
    ("cv2", lambda its, at: its.imread(f"{at}.jpg")), ("numpy", lambda its, at: its.load(f"{at}.npz")["volume"]),
    ("cv2", lambda its, at: its.imdecode(np.fromfile(f"{at}.jpg", np.uint8), 1)),
    ("numpy", lambda its, at: its.loadtxt(f"{at}.txt")), ("numpy", lambda its, at: its.genfromtxt(f"{at}.txt")),
    ("soundfile", lambda its, at: its.read(f"{at}.wav")),
    pytest.param("librosa", lambda its, at: its.load(f"{at}.wav"), marks=pytest.mark.slow),  # compiles for seconds
    ("scipy.io.wavfile", lambda its, at: its.read(f"{at}.wav")), ("scipy.io", lambda its, at: its.loadmat(f"{at}.mat")),
    ("nibabel", lambda its, at: np.asarray(its.load(f"{at}.nii.gz").dataobj)),
    ("nibabel", lambda its, at: its.load(f"{at}.nii.gz").dataobj[..., 2]),
    ("h5py", lambda its, at: its.File(f"{at}.h5")["rows"][2, :3]),
    ("pydicom.data", lambda its, at: sys.modules["pydicom"].dcmread(its.get_testdata_file("MR_small_RLE.dcm")).pixel_array),
    *((name, lambda its, at: its.imread(f"{at}.tiff")) for name in ("imageio.v3", "skimage.io", "tifffile")),
    ("rasterio", lambda its, at: its.open(f"{at}.tiff").read(1)),
])  # fmt: skip
def test_a_library_is_served(library, read, files):
    assert twice(read, pytest.importorskip(library), files)


def test_what_a_cache_leaves_that_nobody_has_closed_is_taken_back(tmp_path):
    files = sys.modules["PIL.ImageFile"].ImageFile
    load = files.load
    cache.open_decoders("1MB", cache.decoders_job(), 0)
    files.load = load  # as a library does that had replaced it
    assert twice(looked_at, image(tmp_path))


def mixed(its, idx):
    """Read two random images."""
    one, other = (np.asarray(Image.open(random.choice(its.paths))) for _ in range(2))
    return one.astype(np.float32) + other * random.random(), idx


def rarely_random(its, idx):
    picture = np.asarray(Image.open(its.paths[idx]))
    return picture + (random.random() if idx == 4 else 0), idx  # not probed


@pytest.mark.linux
@pytest.mark.parametrize(("make", "loader"), [
    (mixed, "torch"), (mixed, "torch, persistent"), (mixed, "ours, 2 workers"), (rarely_random, "torch, 2 workers"),
])  # fmt: skip
def test_samples_that_cannot_be_cached_are_decoded_once(make, loader, tmp_path):
    dataset = Made(make, 12, paths=images(tmp_path, 12))
    expected = epochs(dataset, loader)
    with CachedDataset(dataset, 0.1, probe=2) as cached:
        assert difference_of(epochs(cached, loader), expected) is None
        assert cached.is_left
        (requests, hits) = cached._decoders.stats()["Pillow"]
        assert hits > (0 if make is rarely_random else max(30, requests // 2))
        assert f"of {requests} from memory" in cached.stats().decoders
        with contextlib.closing(pickle.loads(pickle.dumps(cached._decoders))) as of_another_process:  # one that is spawned
            assert of_another_process.stats() == cached._decoders.stats()
    with CachedDataset(dataset, 0.1, probe=2, decoders=False) as cached:
        assert difference_of(epochs(cached, loader), expected) is None
        assert cached.stats().decoders == ""


def test_a_file_that_changes_is_decoded_again(tmp_path):
    cv2, path = pytest.importorskip("cv2"), image(tmp_path, "a.bmp")
    status = os.stat(path)
    with cached_decoders("64MB", audit=0) as decoders:
        before = [cv2.imread(path) for _ in range(2)]
        image(tmp_path, "a.bmp", PIXELS[::-1])
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # of the same size and time
        assert (cv2.imread(path)[::-1] == before[0]).all()
        assert decoders.stats()["OpenCV"] == (3, 1)


@pytest.fixture
def decoder(monkeypatch):
    """Return a stand-in for a library, whose decoder returns what a test sets."""
    module = types.ModuleType("torchaudio")
    module.results, module.load = iter(()), lambda uri: next(module.results)
    monkeypatch.setitem(sys.modules, "torchaudio", module)
    return module


def test_a_decoder_with_other_results_or_that_draws_is_off(decoder, caplog):
    decoder.results = (np.array([number]) for number in range(9))
    with cached_decoders("64MB"):
        assert [decoder.load(b"x")[0] for _ in range(4)] == [0, 1, 2, 3]  # the first hit is compared
    assert "torchaudio.load is not cached: it returns another result for the same content" in caplog.text
    decoder.results = (np.array([random.random()]) for _ in range(9))
    with cached_decoders("64MB"):
        assert len({decoder.load(b"x")[0] for _ in range(4)}) == 4
    assert "torchaudio.load is not cached: it draws random numbers" in caplog.text


@pytest.mark.parametrize("result", [None, np.array([None]), (np.ones(2), object())], ids=["none", "none within", "object"])
def test_results_that_a_copy_could_differ_from_are_the_library_s_own(decoder, result):
    decoder.results = iter([result] * 2)
    with cached_decoders("64MB", audit=0) as decoders:
        assert [decoder.load(b"x") is result for _ in range(2)] == [True, True]
        assert decoders.stats()["torchaudio"][1] == 0


def test_a_stream_is_left_where_the_decoder_leaves_it(decoder):
    decoder.load = lambda stream: np.frombuffer(stream.read(4), np.uint8).copy()
    with cached_decoders("64MB", audit=0) as decoders:
        for _ in range(2):
            stream = io.BytesIO(b"01234567")
            stream.seek(2)
            assert bytes(decoder.load(stream)) == b"2345"
            assert stream.tell() == 6
        assert decoders.stats()["torchaudio"] == (2, 1)


def test_functions_are_replaced_by_all_their_names_and_taken_back(decoder, monkeypatch):
    true, user = decoder.load, types.ModuleType("user")
    user.read = true
    monkeypatch.setitem(sys.modules, "user", user)
    decoder.results = iter([np.ones(3)] * 9)
    with cached_decoders("64MB", audit=0) as one, cached_decoders("64MB", audit=0) as two:
        user.read(b"x"), decoder.load(b"x")
        assert (one.stats(), two.stats()) == ({"torchaudio": (2, 1)}, {"torchaudio": (1, 0)})
        ours = decoder.load
        decoder.load = patched = lambda uri: ours(uri) + 1  # by the user
    assert (decoder.load, user.read) == (patched, true)
    assert decoder.load(b"x")[0] == 2  # what was found before the close decodes


def test_a_decoder_that_takes_no_time_is_left_alone_until_the_next_dataset(decoder, monkeypatch):
    monkeypatch.setattr(cache, "_WORTH", 5)
    decoder.results = iter([np.zeros(1 << 20, np.uint8)] * 99)
    with cached_decoders("64MB") as decoders:
        for _ in range(64):
            decoder.load(b"x")
        assert decoders.stats()["torchaudio"][0] <= cache._PATIENCE + 64 // cache._RARELY
    monkeypatch.setattr(cache, "_WORTH", 0)
    decoder.results = iter([np.zeros(4)])
    with cached_decoders("64MB", audit=0) as decoders:
        decoder.load(b"y"), decoder.load(b"y")
        assert decoders.stats()["torchaudio"] == (2, 1)


def content(uri):
    """Decode a name: return its bytes many times."""
    return np.frombuffer(uri * 1000, np.uint8).copy()


def test_threads_are_served_together(tmp_path):
    paths = images(tmp_path, 8, "png")
    read = lambda path: np.asarray(Image.open(path)).tobytes()
    expected = [read(path) for path in paths * 40]
    with cached_decoders("64MB") as decoders, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, paths * 40)) == expected
        assert decoders.stats()["Pillow"][1] > 100


@pytest.mark.linux
def test_a_child_of_a_child_is_served_and_one_that_is_killed_harms_nobody(decoder):
    decoder.load = content
    with cached_decoders("64MB") as decoders:
        if (child := os.fork()) == 0:
            if (grandchild := os.fork()) == 0:
                os._exit(sum(bytes(decoder.load(b"a")) != b"a" * 1000 for _ in range(5)))
            os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert decoders.stats()["torchaudio"] == (5, 4)
        for killed in range(5):
            if (child := os.fork()) == 0:
                for number in range(10**9):
                    decoder.load(b"%d %d" % (killed, number))
            time.sleep(random.random() / 50)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            for name in (b"%d %d" % (killed, number) for number in range(300)):
                assert bytes(decoder.load(name)) == name * 1000


@pytest.mark.linux
def test_memory_that_ends_and_results_that_are_larger_than_it_leave_the_decoder_alone(decoder, monkeypatch, tmp_path):
    decoder.load, asked = content, []

    def is_full(*arguments):
        asked.append(arguments)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with cached_decoders("64MB") as decoders, monkeypatch.context() as patch:
        decoder.load(b"before")
        patch.setattr(os, "posix_fallocate", is_full)
        for name in [b"%d" % number for number in range(9000)]:
            assert decoder.load(name)[0] == name[0]
        assert bytes(decoder.load(b"before")) == b"before" * 1000
    assert asked
    np.savez_compressed(tmp_path / "bomb.npz", zeros=np.zeros(1 << 24, np.uint8))
    with cached_decoders("8MB") as decoders:
        assert [int(np.load(tmp_path / "bomb.npz")["zeros"].sum()) for _ in range(2)] == [0, 0]
        assert decoders.stats()["numpy"] == (2, 0)


def test_files_that_are_damaged_are_errors_as_without_a_cache(tmp_path):
    cv2, path = pytest.importorskip("cv2"), image(tmp_path)
    good = Path(path).read_bytes()
    with cached_decoders("64MB", audit=0) as decoders:
        for damaged in (b"", b"\xff\xd8\xff\xe0 not an image", good[:100], good[: len(good) // 2]):
            (tmp_path / "b.jpg").write_bytes(damaged)
            for _ in range(2):
                with pytest.raises(OSError, match=r"(?i)cannot identify|truncated|broken"):
                    looked_at(tmp_path / "b.jpg")
                assert len(damaged) > 100 or cv2.imread(str(tmp_path / "b.jpg")) is None
        assert all(hits == 0 for _, hits in decoders.stats().values())
        (tmp_path / "b.jpg").write_bytes(good)
        assert looked_at(tmp_path / "b.jpg")[-1] == Image.open(io.BytesIO(good)).tobytes()
