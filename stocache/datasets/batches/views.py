"""The dataset that a loader iterates in place of the user's: `DatasetView`."""

from types import MemberDescriptorType
from typing import Any

from stocache.system.walking import set_epoch


class DatasetView:
    """Stands in for a dataset within a loader. ``worker_init_fn`` may read and set the attributes of the dataset here."""

    __slots__ = ("dataset",)
    _holds_dataset = True
    is_lazy = False  # whether its batches are each a `LazyBatch`

    dataset: Any

    def __getattr__(self, name: str) -> Any:
        if _is_slot(type(self), name) or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: object) -> None:
        if _is_slot(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.dataset, name, value)

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the dataset."""
        set_epoch(self.dataset, epoch)


def _is_slot(cls: type, name: str) -> bool:
    return isinstance(getattr(cls, name, None), MemberDescriptorType)


def behind_views(dataset: Any) -> Any:
    """Return the dataset behind the views of a loader: the dataset of the user, or the one that returns each `LazyBatch`."""
    while isinstance(dataset, DatasetView) and not dataset.is_lazy:
        dataset = dataset.dataset
    return dataset
