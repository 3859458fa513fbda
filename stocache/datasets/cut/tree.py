"""Find the dataset that makes a sample, and the datasets that are alike.

A *leaf* of the tree is a dataset that makes samples itself. Leaves of one *kind* have the same class and transforms.
"""

from typing import Any

from torch.utils.data import ConcatDataset, Dataset

from stocache.datasets.transforms.pipelines import open_pipeline, step_text
from stocache.system.objects import get_many_of, vars_of
from stocache.system.walking import locate, makers, passes_on

CONVENTIONAL = frozenset({"transform", "transforms", "target_transform"})
"""Attributes that hold transforms, by the conventions of torchvision and timm."""


class DatasetTree:
    """The datasets within a dataset, and the path from an index to the dataset that makes its sample.

    Attributes:
        leaves: the datasets that make samples.
        kinds: for each leaf, the number of the first leaf with the same class and transforms.
        starts: indices at which a different leaf may begin.
        batches: whether one leaf makes all samples of a batch, and is asked for them in one call.
    """

    _holds_dataset = True

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.leaves = makers(dataset)
        self._numbers = {id(leaf): number for number, leaf in enumerate(self.leaves)}
        self._is_leaf = not passes_on(dataset)
        keys = [_key(leaf) for leaf in self.leaves]
        self.kinds = [keys.index(key) for key in keys]
        self.batches = get_many_of(dataset) is not None
        is_concatenated = passes_on(dataset) and isinstance(dataset, ConcatDataset)
        self.starts = [0, *dataset.cumulative_sizes] if is_concatenated else [0]

    def __reduce__(self) -> Any:
        return DatasetTree, (self._dataset,)

    def locate(self, idx: int) -> tuple[int, int]:
        """Return the number of the leaf that makes sample ``idx``, and the index of the sample in that leaf."""
        if self._is_leaf:
            return 0, idx
        leaf, idx = locate(self._dataset, idx)
        return self._numbers[id(leaf)], idx


def _key(leaf: object) -> Any:
    """Return what leaves of one kind have in common: the class, switches, and the transforms that they hold."""
    held: list[tuple[str, Any]] = []
    for name, value in vars_of(leaf).items():
        if isinstance(value, bool):
            held.append((name, value))
        elif value is not None and not isinstance(value, Dataset | type) and (callable(value) or name in CONVENTIONAL):
            held.append((name, tuple(map(step_text, open_pipeline(value).steps))))
    return type(leaf), sorted(held, key=str)
