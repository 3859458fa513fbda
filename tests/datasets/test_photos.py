"""Real photographs through both kinds of cache: bit for bit, through 3 epochs, in 4 workers, under every start method."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from stocache import CachedDataset, RaggedCache, SharedCache
from tests.support.photos import PHOTOS

pytestmark = [
    pytest.mark.skipif(not PHOTOS, reason="no photographs here"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes"),  # more than there are cores
]


class Photos(Dataset):
    """Decoded photos (3, height, width) of uint8, as they are or resized, and their number."""

    def __init__(self, size):
        self.size, self.reads = size, torch.zeros(len(PHOTOS), dtype=torch.int64).share_memory_()

    def __len__(self):
        return len(PHOTOS)

    def __getitem__(self, idx):
        self.reads[idx] += 1
        image = Image.open(PHOTOS[idx]).convert("RGB")
        if self.size:
            image = image.resize(self.size)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), idx


@pytest.fixture(scope="module", params=[None, (160, 120)], ids=["native", "resized"])
def decoded(request):
    source = Photos(request.param)
    return source, [source[idx][0] for idx in range(len(source))]


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["1GiB", "half"])
def test_photos_come_back_bit_for_bit_and_are_read_once(decoded, limit, start_method):
    source, images = decoded
    source.reads.zero_()
    if limit == "half":
        limit = f"{sum(image.nbytes for image in images) // 2}B"
    with CachedDataset(source, limit) as cached:
        assert isinstance(cached.cache, SharedCache if source.size else RaggedCache)
        probes = source.reads.sum().item()
        loader = DataLoader(
            cached, batch_size=10, shuffle=True, num_workers=4, multiprocessing_context=start_method, collate_fn=list,
            persistent_workers=True,
        )  # fmt: skip
        for epoch in range(3):
            before = source.reads.sum().item()
            seen = set()
            for batch in loader:
                for image, idx in batch:
                    seen.add(idx)
                    assert image.dtype == torch.uint8
                    assert torch.equal(image, images[idx])
            assert len(seen) == len(source)
            if epoch == 0:
                resident = cached.stats().total.filled
                assert resident == (len(source) if limit == "1GiB" else resident)
                assert 0.3 * len(source) < resident
            else:
                assert source.reads.sum() - before == len(source) - resident  # exactly
        assert probes == 9  # the first of 8 twice
        del loader
