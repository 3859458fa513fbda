"""Serve prepared samples from a cache to a Lightning Trainer, and log the hit rate (extra ``lightning``)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic

import numpy as np
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import Dataset, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from stocache.datasets.cached import CachedDataset
from stocache.errors import LimitError, StateError
from stocache.loader.dataloader import DataLoader
from stocache.loader.engine import engine_of
from stocache.loader.samplers.block import BlockSampler
from stocache.observe.verdict import Verdict
from stocache.samples.indices import check_indices
from stocache.storage.dataset import StorageDataset
from stocache.storage.preparation.prepare import prepare
from stocache.storage.preparation.source import DataPreparer
from stocache.storage.storage import DataStorage, OnDiskBlockDataStorage, TInfo, TSample
from stocache.storage.urls import is_url
from stocache.system.hashing import checksum
from stocache.system.limits import parse_size
from stocache.system.objects import has_methods
from stocache.system.state import StateForm

Split = Mapping[str, float] | Callable[[Any, int], Mapping[str, Sequence[int]]]
PARTS = ("train", "val", "test")
_FORM = StateForm("DataModule", 2, position={}, parts={"split": (dict,)})  # a checksum of each part of the split


class DataModule(LightningDataModule, Generic[TSample, TInfo]):
    """Prepares samples once, splits them, and serves them to a Trainer from a cache, one copy per machine for all ranks.

        data = DataModule(OnDiskBlockDataStorage("photos"), PhotoPreparer(), batch_size=256, size_limit_gib=32, num_workers=8)
        Trainer(callbacks=[CacheMonitor()]).fit(model, data)

    Args:
        storage: holds the samples, or will hold them after preparation.
        preparer: makes the samples, if the storage is not prepared.
        batch_size: samples in a batch.
        split: shares of the samples for "train", "val" and "test"; or a function of the info and the number of samples that
            returns the indices of each part.
        stratify: a function of the info that returns the label of each sample. Each part then has its share of every label.
        size_limit_gib: memory of the cache on this machine, as for `CachedDataset`: for the training samples, or a dict with a
            limit for each part. 0 for no cache.
        transforms: for each part, a function that is called with each sample after the cache.
        window: number of blocks whose samples are shuffled together, for a storage of blocks (`BlockSampler`).
        seed: of the split, and of the order of blocks.
        shuffle_seed: assign samples to blocks at random during preparation, with this seed.
        prepare_workers: ``num_workers`` of `prepare`.
        cache_options: other arguments of `CachedDataset`.
        loader_options: other arguments of `DataLoader`: num_workers, pin_memory, collate_fn and so on.

    Attributes:
        datasets: the dataset of each part, from `setup` on.

    Raises:
        LimitError: a part has a different name, the shares add up to more than 1, or an index is in two parts.

    If several ranks train, all have equally many training samples: an epoch leaves out up to one sample per rank. The ranks of
    a machine share one cache. Its name is derived from the samples and these arguments.
    Source: the article on block storage in PyTorch Lightning.
    """

    def __init__(
        self,
        storage: DataStorage[TSample, TInfo],
        preparer: DataPreparer[TSample, TInfo],
        *,
        batch_size: int = 32,
        split: Split | None = None,
        stratify: Callable[[TInfo], Sequence[Any]] | None = None,
        size_limit_gib: float | str | Mapping[str, float | str] = "auto",
        transforms: Mapping[str, Callable[[Any], Any]] | None = None,
        window: int = 16,
        seed: int = 0,
        shuffle_seed: int | None = None,
        prepare_workers: int = 0,
        cache_options: Mapping[str, Any] | None = None,
        **loader_options: Any,
    ) -> None:
        super().__init__()
        if isinstance(storage, OnDiskBlockDataStorage) and is_url(storage.base_folder):
            self.prepare_data_per_node = False  # a URL has no lock with which machines could wait for each other
        self.storage, self.preparer = storage, preparer
        self.batch_size, self.window, self.seed = batch_size, window, seed
        self._split = {"train": 0.8, "val": 0.1, "test": 0.1} if split is None else split
        if not callable(self._split):
            _check_parts(self._split, "split")
            if min(self._split.values(), default=0) < 0 or sum(self._split.values()) > 1 + 1e-9:
                raise LimitError(f"split={dict(self._split)!r}: shares must be between 0 and 1, and add up to at most 1.")
        self._stratify = stratify
        self._limits = dict(size_limit_gib) if isinstance(size_limit_gib, Mapping) else {"train": size_limit_gib}
        self._transforms = dict(transforms or {})
        _check_parts(self._limits, "size_limit_gib")
        _check_parts(self._transforms, "transforms")
        self._shuffle_seed, self._prepare_workers = shuffle_seed, prepare_workers
        self._cache_options, self._loader_options = dict(cache_options or {}), loader_options
        self.datasets: dict[str, Dataset[Any]] = {}

    def prepare_data(self) -> None:
        """Prepare the samples if they are not. Lightning calls this in one process per machine; for a URL, in one process."""
        storage = self.storage
        if has_methods(storage, OnDiskBlockDataStorage, "start_preparation", "save_sample", "finish_preparation"):
            assert isinstance(storage, OnDiskBlockDataStorage)
            if not storage.is_prepared():
                prepare(
                    self.preparer,
                    storage.base_folder,
                    num_workers=self._prepare_workers,
                    block_size=storage.asked_block_size,
                    block_bytes=storage.block_bytes,
                    shuffle_seed=self._shuffle_seed,
                    allow_pickle=storage.allow_pickle,
                    storage_options=storage.storage_options,
                )
        elif not storage.is_prepared():
            storage.start_preparation()
            for sample in self.preparer.prepare_data():
                storage.save_sample(sample)
            storage.finish_preparation(self.preparer.get_dataset_info())

    def setup(self, stage: str) -> None:
        """Split the samples and make the dataset of each part. The split is the same in every rank."""
        if self.datasets:
            return
        info = self.storage.load_dataset_info()
        length = self.dataset_len(info)
        taken = np.zeros(length, bool)
        for part, indices in self.split(info).items():
            index = np.sort(check_indices(indices, length, f"the split's {part}"))
            if taken[index].any() or (np.diff(index) == 0).any():
                raise LimitError(f"split: a sample of {part!r} is in two parts, or twice in this one.")
            taken[index] = True
            self.datasets[part] = self._cached(part, StorageDataset(self.storage, index))

    def dataset_len(self, info: TInfo) -> int:
        """Return the number of samples. Override it for a storage without a length."""
        return len(self.storage)  # type: ignore[arg-type]

    def split(self, info: TInfo) -> Mapping[str, Sequence[int]]:
        """Return the indices of each part, "train", "val" and "test". Override it, or give the argument ``split``."""
        length = self.dataset_len(info)
        if callable(self._split):
            parts = self._split(info, length)
            _check_parts(parts, "split")
            return parts
        labels = np.zeros(length) if self._stratify is None else np.asarray(self._stratify(info))
        if len(labels) != length:
            raise LimitError(f"stratify returned {len(labels)} labels for {length} samples.")
        rng = np.random.default_rng(self.seed)
        found: dict[str, list[int]] = {part: [] for part in self._split}
        shares = np.cumsum([0.0, *self._split.values()])
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            bounds = np.round(shares * len(members)).astype(int)
            for part, begin, end in zip(found, bounds[:-1], bounds[1:], strict=True):
                found[part] += members[begin:end].tolist()
        return found

    def _cached(self, part: str, dataset: StorageDataset[TSample]) -> Dataset[Any]:
        limit, transform = self._limits.get(part, 0), self._transforms.get(part)
        if not len(dataset) or (limit != "auto" and parse_size(limit) == 0 and transform is None):
            return dataset
        options = dict(self._cache_options)
        trainer = self.trainer
        if trainer is not None and trainer.world_size > 1 and isinstance(self.storage, OnDiskBlockDataStorage):
            same = f"{self.storage.index.checksum} {_digest(dataset)}"
            key = f"{same} {part} {limit} {sorted(options.items(), key=str)}"
            options = {"name": f"datamodule-{checksum(key.encode())}", "fingerprint": same} | options
        return CachedDataset(dataset, limit, transform=transform, **options)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the training samples, shuffled."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the validation samples, in order."""
        return self._loader("val", shuffle=False)

    def test_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the test samples, in order."""
        return self._loader("test", shuffle=False)

    def _loader(self, part: str, shuffle: bool) -> DataLoader[Any]:
        dataset = self.datasets.get(part)
        if dataset is None:
            raise LimitError(f"the split has no part {part!r}, it has {sorted(self.datasets)}.")
        options = dict(self._loader_options)
        options.setdefault("persistent_workers", bool(options.get("num_workers")))
        loader: DataLoader[Any] = DataLoader(dataset, self.batch_size, sampler=self.sampler(dataset, shuffle), **options)
        return loader

    def sampler(self, dataset: Any, shuffle: bool) -> Sampler[int]:
        """Return the sampler of a dataset: a `BlockSampler` if the storage has blocks."""
        size, trainer = getattr(self.storage, "block_size", None), self.trainer
        if size is None and shuffle and trainer is not None:  # it sets the epoch of the sampler, also after a checkpoint
            return DistributedSampler(dataset, trainer.world_size, trainer.global_rank, seed=self.seed)
        if size is None:
            return RandomSampler(dataset) if shuffle else SequentialSampler(dataset)
        return BlockSampler(
            dataset.indices,
            size,
            shuffle,
            window=self.window,
            seed=self.seed,
            drop_last=shuffle,
            prefetch=dataset.prefetch_blocks,
            rank=None if trainer is None else trainer.global_rank,
            world_size=None if trainer is None else trainer.world_size,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: a checksum of the split. The loaders have their own states."""
        return _FORM.make({}, {}, {"split": self._digests()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that training continues with the split of the checkpoint, if this module and the checkpoint have one.

        Raises:
            StateError: it is not a state of a DataModule, or the parts have other samples than the samples of the checkpoint.
        """
        own, saved = self._digests(), _FORM.read(state, {})[1]["split"]
        differing = [part for part in own | saved if own and saved and own.get(part) != saved.get(part)]
        if differing:
            raise StateError(f"the checkpoint is of another split, with other samples in {differing}. Split as before.")

    def _digests(self) -> dict[str, str]:
        return {part: _digest(dataset) for part, dataset in self.datasets.items()}

    def close(self) -> None:
        """Close the caches. May be called twice."""
        for dataset in self.datasets.values():
            if isinstance(dataset, CachedDataset):
                dataset.close()
        self.datasets = {}


class CacheMonitor(Callback):
    """Logs statistics of the cache after each training epoch, to all loggers of the Trainer.

    ``cache/hit_rate``: share of this epoch's samples of rank 0 that came from the cache; ``cache/fill``: share of all samples
    that it holds; ``cache/waited_s``, ``cache/waited_share``: seconds for which the trainer waited, and their share;
    ``cache/wait_p50_s``, ``_p95_s``, ``_p99_s``, ``_max_s``: how long it waited for each batch;
    ``cache/load_p50_s`` and so on: how long it took to load each sample that was not cached.

    If the trainer waited, logs one line with the reason.

    Attributes:
        verdict: the reason that it has logged for the last epoch; None if the trainer hardly waited.
    """

    def __init__(self) -> None:
        self.verdict: Verdict | None = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the epoch that has ended."""
        loader = trainer.train_dataloader
        if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, CachedDataset):
            return
        epochs = engine_of(loader).stats().epochs
        if not epochs:
            return
        epoch = epochs[-1]
        percentiles = {f"{name}_{key}": value for name in ("wait", "load") for key, value in vars(getattr(epoch, name)).items()}
        metrics = {f"cache/{name}": value for name, value in percentiles.items() if name.endswith("_s")} | {
            "cache/hit_rate": epoch.hit_rate or 0.0,
            "cache/fill": loader.dataset.stats().total.fill_fraction,
            "cache/waited_s": epoch.waited_s,
            "cache/waited_share": epoch.waited_share,
        }
        self.verdict = epoch.verdict
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics({**metrics, "epoch": trainer.current_epoch}, step=trainer.global_step)
            if epoch.verdict is not None:
                rank_zero_info(f"epoch {trainer.current_epoch}: {epoch.verdict}")


def _check_parts(mapping: Mapping[str, Any], name: str) -> None:
    strange = sorted(set(mapping) - set(PARTS))
    if strange:
        raise LimitError(f"{name} has the parts {strange}; there are {', '.join(PARTS)}.")


def _digest(dataset: Any) -> str:
    return checksum(np.asarray(dataset.indices, dtype=np.int64).tobytes())
