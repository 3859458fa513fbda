"""The adapters to other libraries give what the libraries give, from one copy for all processes."""

import asyncio
import pickle
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from stocache import KeyedCache
from stocache.integrations.lerobot import cache_frames
from tests.support.equality import same


class Episodes(torch.utils.data.Dataset):
    """In place of LeRobotDataset: its windows of frames of two cameras."""

    def __init__(self, log):
        self.log, self.fps, self.length = Path(log), 10, 30

    def __len__(self):
        return 2 * self.length

    root = "episodes"

    def _query_videos(self, query_timestamps, ep_idx):
        item = {}
        for camera, seconds in query_timestamps.items():
            with self.log.open("a") as log:
                log.writelines(f"{camera} {ep_idx} {second:.3f}\n" for second in seconds)
            frames = [torch.full((3, 4, 5), (ep_idx * 100 + second) / 255 + (camera == "right")) for second in seconds]
            item[camera] = torch.stack(frames).squeeze(0)
        return item

    def __getitem__(self, idx):
        ep_idx, at = divmod(idx, self.length)
        seconds = [max(0, at - step) / self.fps for step in range(5)]
        return self._query_videos({"left": seconds, "right": seconds[:1]}, ep_idx)


@pytest.mark.linux
@pytest.mark.parametrize("workers", [0, 2])
def test_frames_of_windows_are_decoded_once(tmp_path, workers):
    plain, dataset = Episodes(tmp_path / "plain"), Episodes(tmp_path / "cached")
    expected = [plain[idx] for idx in range(len(plain))]
    frames = cache_frames(dataset, "4MB")
    for _ in range(2):
        context = "fork" if workers else None
        batches = TorchDataLoader(dataset, None, num_workers=workers, multiprocessing_context=context)
        assert same(list(batches), expected)
    decoded = (tmp_path / "cached").read_text().splitlines()
    assert len(decoded) == len(set(decoded)) == 2 * 2 * 30  # two cameras, two episodes
    frames.close()
    assert dataset._query_videos.__func__ is Episodes._query_videos
    assert same(dataset[3], expected[3])


def test_frames_are_taken_from_the_part_that_decodes_them_and_what_has_none_is_refused(tmp_path):
    newer = SimpleNamespace(root="episodes", reader=Episodes(tmp_path / "log"))
    frames = cache_frames(newer, "1MB")
    assert newer.reader._query_videos is frames
    frames.close()
    with pytest.raises(TypeError, match="SimpleNamespace has no _query_videos"):
        cache_frames(SimpleNamespace(root=""), "1MB")


@pytest.mark.linux
def test_monai_s_cache_dataset_is_one_copy_with_the_same_items():
    monai = pytest.importorskip("monai")
    from stocache.integrations.monai import CacheDataset

    items = [{"image": np.full((1, 6, 6), number, np.float32)} for number in range(12)]
    transform = monai.transforms.Compose([
        monai.transforms.ScaleIntensityRanged("image", 0, 12, 0, 1), monai.transforms.RandFlipd("image", 0.5),
        monai.transforms.RandGaussianNoised("image", 0.5),
    ])  # fmt: skip
    datasets = [
        monai.data.CacheDataset(items, transform, cache_num=8, num_workers=0, progress=False),
        CacheDataset(items, transform, cache_num=8, num_workers=0, progress=False, copy_cache=False, size_limit_gib="4MB"),
    ]
    epochs = []
    for dataset in datasets:
        monai.utils.set_determinism(0)
        loader = monai.data.DataLoader(dataset, batch_size=4, num_workers=0)
        epochs.append([torch.as_tensor(batch["image"]) for _ in range(3) for batch in loader])
    monai.utils.set_determinism(None)
    assert same(*epochs)
    states = datasets[1].cache.aux_array.tolist()
    assert states[:8] == [1] * 8
    assert 2 in states[8:]  # outside, but for batches that were looked at first
    datasets[1].close()


@pytest.mark.leaves_descriptors  # of zarr's event loop
def test_a_chunk_of_zarr_is_read_once_by_all_and_what_is_written_is_seen():
    zarr = pytest.importorskip("zarr", minversion="3")
    from stocache.integrations.zarr import CachedStore

    store = zarr.storage.MemoryStore()
    array = zarr.create_array(store, shape=(8, 8), chunks=(4, 4), dtype="i4")
    array[:] = np.arange(64).reshape(8, 8)
    reads, get = [], store.get

    async def reading(key, *arguments):
        reads.append(key)
        return await get(key, *arguments)

    store.get = reading
    with KeyedCache("4MB") as cache:
        cached = zarr.open_array(CachedStore(store, cache), mode="r+")
        again = zarr.open_array(CachedStore(store, pickle.loads(pickle.dumps(cache))), mode="r")
        for each in (cached, again, cached):
            assert np.array_equal(each[:], np.arange(64).reshape(8, 8))
        chunks = [key for key in reads if key.startswith("c/")]
        assert len(chunks) == len(set(chunks)) == 4
        cached[0, 0] = 99
        assert cached[0, 0] == 99
        asyncio.run(cached.store.delete("c/1/1"))
        assert cached[7, 7] == 0


def test_ultralytics_trains_bit_for_bit_as_without_a_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    pytest.importorskip("ultralytics")
    from PIL import Image
    from ultralytics.cfg import get_cfg
    from ultralytics.data.dataset import YOLODataset

    from stocache.integrations.ultralytics import CachedImages

    rng = np.random.default_rng(0)
    for number in range(12):
        for folder in ("images", "labels"):
            (tmp_path / folder).mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (90, 120, 3), np.uint8)).save(tmp_path / "images" / f"{number:02}.png")
        (tmp_path / "labels" / f"{number:02}.txt").write_text(f"{number % 3} 0.5 0.5 0.4 0.4\n")
    data = {"names": {0: "a", 1: "b", 2: "c"}, "nc": 3, "channels": 3}

    def epochs(cache):
        hyp = get_cfg(overrides={"imgsz": 64, "mosaic": 1.0, "mixup": 0.5})
        dataset = YOLODataset(
            img_path=str(tmp_path / "images"), imgsz=64, cache=False, augment=True, hyp=hyp, batch_size=4, data=data
        )
        if cache is not None:
            dataset.load_image = CachedImages(dataset, cache)
        samples = []
        for number in range(2):
            random.seed(number), np.random.seed(number), torch.manual_seed(number)
            samples += [dataset[idx] for idx in torch.randperm(len(dataset)).tolist()]
        return [(each["img"], each["bboxes"], each["cls"], each["im_file"]) for each in samples]

    with KeyedCache("8MB") as cache:
        assert same(epochs(None), epochs(cache))
        assert cache.stats().filled >= 12
        misses = cache.stats().misses
        assert same(epochs(None), epochs(cache))
        assert cache.stats().misses == misses
