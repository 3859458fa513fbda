"""The DataModule, with a real Trainer: one process, two of them, and one that was interrupted."""

import contextlib
import csv
import itertools
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

import stocache
from stocache import BlockSampler, CachedDataset, LimitError, OnDiskBlockDataStorage, StateError
from tests.support.edits import through_json
from tests.support.ranks import of_all_ranks, run_ranks
from tests.support.storages import FilePerSample

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from stocache.integrations.lightning import CacheMonitor, DataModule

pytestmark = [  # of loggers, multiprocessing's server
    pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.leaves_descriptors
]  # fmt: skip

N = 240
LABELS = [0 if idx < 24 else 1 + idx % 3 for idx in range(N)]


class Preparer(stocache.DataPreparer):
    runs = 0

    def prepare_data(self):
        self.runs += 1
        for idx in range(N):
            yield torch.full((3, 4, 4), idx, dtype=torch.uint8), idx

    def get_dataset_info(self):
        return {"labels": LABELS}


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen, self.validated, self.tested = torch.nn.Linear(48, 1), [], [], []

    def training_step(self, batch, number):
        images, labels = batch
        assert (images[:, 0, 0, 0] == labels).all()
        self.seen.append(labels.tolist())
        return self.layer(images.float().flatten(1)).mean()

    def validation_step(self, batch, number):
        self.validated += batch[1].tolist()

    def test_step(self, batch, number):
        self.tested += batch[1].tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def trainer(folder, **options):
    fixed = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return lightning.Trainer(**{"default_root_dir": folder, "logger": False, "enable_checkpointing": False} | fixed | options)


def module(folder, storage=None, cls=DataModule, **options):
    if storage is None:
        storage = OnDiskBlockDataStorage(Path(folder, "data"), 10)
    return cls(storage, Preparer(), **{"batch_size": 8, "size_limit_gib": "10MB"} | options)


@contextlib.contextmanager
def ready(folder, **options):
    """A module with its datasets."""
    data = module(folder, **options)
    data.prepare_data()
    try:
        data.setup("fit")
        yield data
    finally:
        data.close()


flat = lambda batches: list(itertools.chain.from_iterable(batches))


def parts_of(folder, **options):
    with ready(folder, **options) as data:
        return {part: list(map(int, dataset.indices)) for part, dataset in data.datasets.items()}


def test_it_prepares_splits_trains_validates_tests_and_logs(tmp_path):
    data, model, logger = module(tmp_path, num_workers=2, size_limit_gib="6KB"), Model(), CSVLogger(tmp_path)
    fit = trainer(tmp_path, max_epochs=2, logger=logger, callbacks=[CacheMonitor()], log_every_n_steps=1)
    fit.fit(model, data)
    fit.test(model, data)
    epochs = [sorted(flat(model.seen[at : at + 24])) for at in (0, 24)]
    assert epochs[0] == epochs[1] == list(data.datasets["train"].indices)
    assert model.validated == list(data.datasets["val"].indices) * 2
    assert model.tested == list(data.datasets["test"].indices)
    assert sorted([*epochs[0], *model.validated[: len(model.validated) // 2], *model.tested]) == list(range(N))
    assert isinstance(data.datasets["val"], stocache.StorageDataset)
    assert (data.preparer.runs, data.train_dataloader().num_workers) == (1, 2)
    again = module(tmp_path)
    again.prepare_data()
    assert again.preparer.runs == 0
    with open(Path(logger.log_dir, "metrics.csv")) as file:
        table = [row for row in csv.DictReader(file) if row["cache/fill"]]
    share = data.datasets["train"].stats().total.fill_fraction
    assert [int(row["epoch"]) for row in table] == [0, 1]
    assert 0.2 < share < 0.8
    assert float(table[1]["cache/hit_rate"]) == float(table[1]["cache/fill"]) == pytest.approx(share)
    assert float(table[1]["cache/waited_s"]) > 0
    data.close()


class Sized(DataModule):
    dataset_len = lambda self, info: len(info["labels"])


def test_any_storage_will_do_which_saves_the_samples_itself(tmp_path):
    data, model = module(tmp_path, FilePerSample(tmp_path / "data"), Sized, seed=3), Model()
    trainer(tmp_path, max_epochs=1).fit(model, data)
    assert sorted(flat(model.seen)) == list(data.datasets["train"].indices)
    assert data.prepare_data_per_node
    sampler = data.train_dataloader().sampler
    assert (type(sampler), sampler.seed) == (DistributedSampler, 3)  # whose epoch Lightning sets
    data.trainer = None
    assert isinstance(data.train_dataloader().sampler, RandomSampler)
    assert isinstance(data.val_dataloader().sampler, SequentialSampler)
    data.close()


def test_parts_are_as_asked_for_and_the_same_each_time(tmp_path):
    split = {"train": 0.5, "val": 0.25}
    parts = parts_of(tmp_path, split=split)
    assert {part: len(indices) for part, indices in parts.items()} == {"train": 120, "val": 60}
    assert parts_of(tmp_path, split=split) == parts
    assert parts_of(tmp_path, split=split, seed=1) != parts
    assert not set(parts["train"]) & set(parts["val"])
    parts = parts_of(tmp_path, stratify=lambda info: info["labels"])
    for part, share in {"train": 0.8, "val": 0.1, "test": 0.1}.items():
        counts = np.bincount(np.array(LABELS)[parts[part]])
        assert np.abs(counts - share * np.bincount(LABELS)).max() <= 1
    assert sorted(flat(parts.values())) == list(range(N))
    split = lambda info, length: {"train": range(length - 10), "test": range(length - 10, length)}
    assert parts_of(tmp_path, split=split) == {"train": list(range(N - 10)), "test": list(range(N - 10, N))}
    with ready(tmp_path, split=split) as data, pytest.raises(LimitError, match="the split has no part 'val', it has"):
        data.val_dataloader()


def test_each_part_has_its_cache_its_transform_and_its_sampler_and_samples_at_a_url_are_prepared_by_one_machine(tmp_path):
    storage = OnDiskBlockDataStorage(f"file://{tmp_path}/url", 10, local_folder=tmp_path / "local", storage_options={})
    options = {"size_limit_gib": {"train": "20KB", "val": "1MB"}, "storage": storage}
    with ready(tmp_path, transforms={"val": lambda sample: (sample[0].float(), sample[1])}, **options) as data:
        assert (data.prepare_data_per_node, len(storage)) == (False, N)
        train, val = data.datasets["train"], data.datasets["val"]
        assert [isinstance(data.datasets[part], CachedDataset) for part in ("train", "val", "test")] == [True, True, False]
        assert val[0][0].dtype == torch.float32
        assert train.stats().total.capacity_bytes < 30_000 < val.stats().total.capacity_bytes + 30_000
        assert isinstance(data.train_dataloader().sampler, BlockSampler)
        assert list(data.val_dataloader().sampler) == list(range(len(val)))


def test_wrong_options_and_splits_are_errors(tmp_path):
    by = lambda **parts: {"split": lambda info, length: parts}
    for options, message in (
        ({"split": {"train": 0.8, "valid": 0.2}}, r"split has the parts \['valid'\]; there are train, val, test"),
        ({"split": {"train": 0.8, "val": 0.3}}, "add up to at most 1"), ({"split": {"train": -0.1}}, "between 0 and 1"),
        ({"size_limit_gib": {"training": 1}}, r"size_limit_gib has the parts \['training'\]"),
        ({"transforms": {"x": str}}, r"transforms has the parts \['x'\]"), (by(all=[1]), r"parts \['all'\]"),
        (by(train=[0, 1], val=[1]), "a sample of 'val' is in two parts"), (by(train=[0, 0]), "or twice in this one"),
        (by(train=[N]), "the split's train"), ({"stratify": lambda info: [1]}, f"stratify returned 1 labels for {N} samples"),
    ):  # fmt: skip
        with pytest.raises((LimitError, IndexError), match=message), ready(tmp_path, **options):
            pass


@pytest.mark.parametrize("workers", [0, 2])
def test_the_trainer_resumes_within_an_epoch_of_the_same_split(tmp_path, workers):
    checkpoints = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=7, save_top_k=-1)
    data, model = module(tmp_path, num_workers=workers), Model()
    trainer(tmp_path, max_epochs=2, callbacks=[checkpoints], enable_checkpointing=True).fit(model, data)
    data.close()

    def resume(step, **options):
        resumed = Model()
        with ready(tmp_path, num_workers=workers, **options) as again:
            trainer(tmp_path, max_epochs=2).fit(resumed, again, ckpt_path=tmp_path / f"step={step}.ckpt", weights_only=False)
        return resumed.seen

    for step in (7, 28):
        assert resume(step) == model.seen[step:]
    with pytest.raises(StateError, match=r"another split, with other samples in \['train', 'val', 'test'\]"):
        resume(7, seed=1)


def test_what_is_not_a_state_of_a_module_is_refused(tmp_path):
    with ready(tmp_path) as data:
        state = through_json(data.state_dict())
        data.load_state_dict(state)
        for wrong, message in (
            (state | {"version": 1}, "this state has version 1"),
            (state | {"parts": {"split": None}}, "split=None"),
            (state | {"parts": {"split": {"train": object()}}}, "another split"),
        ):
            with pytest.raises(StateError, match=message):
                data.load_state_dict(wrong)


def train_in_rank(rank, folder):
    data, model = module(folder, num_workers=1, stratify=lambda info: info["labels"]), Model()
    fit = trainer(folder, max_epochs=2, strategy="ddp", devices=2, callbacks=[CacheMonitor()])
    fit.fit(model, data)
    stats = data.datasets["train"].stats().total
    train, val = (list(map(int, data.datasets[part].indices)) for part in ("train", "val"))
    assert stats.filled == stats.fills == len(train)  # blocks are admitted whole, by both together: it is one cache
    ranks = of_all_ranks((model.seen, model.validated))
    for epoch in range(2):
        shares = [flat(seen[epoch * 12 : epoch * 12 + 12]) for seen, _ in ranks]
        assert len(shares[0]) == len(shares[1]) == len(train) // 2
        assert len(set(shares[0] + shares[1])) == len(train) // 2 * 2  # one is left out, a different one each time
        assert set(shares[0] + shares[1]) <= set(train)
    assert sorted(ranks[0][1] + ranks[1][1]) == sorted(val * 2)
    fit.strategy.barrier()
    data.close()


def test_two_ranks_share_the_samples_and_one_cache(tmp_path):
    run_ranks(train_in_rank, tmp_path)
