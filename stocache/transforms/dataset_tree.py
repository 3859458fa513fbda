"""Find the dataset that makes a sample, through torch's Subset and ConcatDataset.

A *leaf* of the tree is a dataset that makes samples itself. Leaves of one *kind* have the same class and transforms.
"""

import bisect
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from stocache.transforms.patching import find_sites
from stocache.transforms.pipelines import open_pipeline, step_text


class DatasetTree:
    """The datasets within a dataset, and the path from an index to the dataset that makes its sample.

    Attributes:
        leaves: the datasets that make samples.
        kinds: for each leaf, the number of the first leaf with the same class and transforms.
        starts: indices at which another leaf may begin.
        batches: whether one leaf makes all samples of a batch, and is asked for them in one call.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.leaves = find_leaves(dataset)
        self._numbers = {id(leaf): number for number, leaf in enumerate(self.leaves)}
        self._is_leaf = len(self.leaves) == 1 and self.leaves[0] is dataset
        keys = [_key(leaf) for leaf in self.leaves]
        self.kinds = [keys.index(key) for key in keys]
        inner = dataset
        while _is(inner, Subset):
            inner = inner.dataset
        self.batches = inner is self.leaves[0]
        self.starts = [0, *dataset.cumulative_sizes] if _is(dataset, ConcatDataset) else [0]

    def locate(self, idx: int) -> tuple[int, int]:
        """Return the number of the leaf that makes sample ``idx``, and the index of the sample in that leaf."""
        if self._is_leaf:
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


def find_leaves(dataset: Any) -> list[Any]:
    """Return the datasets within a dataset that make samples, each once."""
    if _is(dataset, Subset):
        return find_leaves(dataset.dataset)
    if _is(dataset, ConcatDataset):
        found = {id(leaf): leaf for inner in dataset.datasets for leaf in find_leaves(inner)}
        return list(found.values())
    return [dataset]


def _is(dataset: Any, cls: Any) -> bool:
    """Whether a dataset takes its samples from others as torch's class does."""
    return isinstance(dataset, cls) and type(dataset).__getitem__ is cls.__getitem__


def _key(leaf: Any) -> Any:
    steps = tuple(
        (site, None if transform is None else tuple(map(step_text, open_pipeline(transform).steps)))
        for site, transform in find_sites(leaf).items()
    )
    return type(leaf), steps
