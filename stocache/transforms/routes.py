"""Which dataset within a dataset has a sample: through torch's Subset and ConcatDataset, to the ones that make samples."""

import bisect
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from stocache.transforms.pipelines import open_pipeline, told_step
from stocache.transforms.twins import find_sites


class Route:
    """The way from an index to the dataset that makes its sample, and the index there.

    Attributes:
        leaves: the datasets that make samples.
        kinds: for each of them, the number of the first one with the same class and transforms.
        starts: indices at which another dataset may begin.
        batches: whether the samples of a batch are all made by one dataset, which is asked for them at once.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.leaves = leaves_of(dataset)
        self._numbers = {id(leaf): number for number, leaf in enumerate(self.leaves)}
        self._direct = len(self.leaves) == 1 and self.leaves[0] is dataset
        keys = [_key(leaf) for leaf in self.leaves]
        self.kinds = [keys.index(key) for key in keys]
        inner = dataset
        while _is(inner, Subset):
            inner = inner.dataset
        self.batches = inner is self.leaves[0]
        self.starts = [0, *dataset.cumulative_sizes] if _is(dataset, ConcatDataset) else [0]

    def __call__(self, idx: int) -> tuple[int, int]:
        """Return the number of a dataset, and an index in it."""
        if self._direct:
            return 0, idx
        dataset = self._dataset
        while True:
            if _is(dataset, Subset):
                dataset, idx = dataset.dataset, int(dataset.indices[idx])
            elif _is(dataset, ConcatDataset):
                if idx < 0:
                    idx += len(dataset)
                number = bisect.bisect_right(dataset.cumulative_sizes, idx)
                idx -= dataset.cumulative_sizes[number - 1] if number else 0
                dataset = dataset.datasets[number]
            else:
                return self._numbers[id(dataset)], idx


def leaves_of(dataset: Any) -> list[Any]:
    """Return the datasets within that make samples, each once."""
    if _is(dataset, Subset):
        return leaves_of(dataset.dataset)
    if _is(dataset, ConcatDataset):
        found = {id(leaf): leaf for inner in dataset.datasets for leaf in leaves_of(inner)}
        return list(found.values())
    return [dataset]


def _is(dataset: Any, cls: Any) -> bool:
    """Whether it takes samples from others as torch's class does."""
    return isinstance(dataset, cls) and type(dataset).__getitem__ is cls.__getitem__


def _key(leaf: Any) -> Any:
    transforms = find_sites(leaf)
    told = tuple(
        (site, None if transform is None else tuple(map(told_step, open_pipeline(transform).steps)))
        for site, transform in transforms.items()
    )
    return type(leaf), told
