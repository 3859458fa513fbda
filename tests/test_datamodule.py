"""The DataModule, with a real Trainer: one process, two of them, and one that was interrupted."""

import itertools
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from stocache import (
    BlockSampler,
    CachedDataset,
    InMemoryDataStorage,
    LimitError,
    OnDiskBlockDataStorage,
    StateError,
    StorageDataset,
)
from tests.support.storages import FilePerSample

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from stocache.datamodule import CacheMonitor, DataModule
    from tests.support.training import LABELS, Model, N, Preparer, module, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.leaves_descriptors,  # loggers, and multiprocessing's server
]


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


@pytest.mark.parametrize("workers", [0, 2])
def test_it_prepares_splits_trains_validates_and_tests(tmp_path, workers):
    data, model = module(tmp_path, num_workers=workers), Model()
    fit = trainer(tmp_path, max_epochs=2)
    fit.fit(model, data)
    fit.test(model, data)
    epochs = [sorted(flat(model.seen[at : at + 24])) for at in (0, 24)]
    assert epochs[0] == epochs[1] == list(data.datasets["train"].indices)
    assert model.validated == list(data.datasets["val"].indices) * 2
    assert model.tested == list(data.datasets["test"].indices)
    assert sorted([*epochs[0], *model.validated[: len(model.validated) // 2], *model.tested]) == list(range(N))
    assert data.datasets["train"].stats().total.filled == len(epochs[0])
    assert isinstance(data.datasets["val"], StorageDataset)
    data.close()
    data.close()


def test_samples_at_a_url_are_prepared_by_one_machine(tmp_path):
    storage = OnDiskBlockDataStorage(f"file://{tmp_path}/url", 10, local_folder=tmp_path / "local", storage_options={})
    data = DataModule(storage, Preparer(), batch_size=8)
    assert not data.prepare_data_per_node
    assert module(tmp_path).prepare_data_per_node
    data.prepare_data()
    assert len(storage) == N


def test_what_is_prepared_is_not_prepared_again(tmp_path):
    runs = Preparer.runs
    for _ in range(2):
        module(tmp_path).prepare_data()
    assert Preparer.runs == runs + 1


@pytest.mark.parametrize("make", [lambda path: InMemoryDataStorage(path / "data"), lambda path: FilePerSample(path / "data")])
def test_any_storage_will_do(tmp_path, make):
    class Sized(DataModule):
        def dataset_len(self, info):
            return len(info["labels"])

    data, model = Sized(make(tmp_path), Preparer(), batch_size=8, size_limit_gib="1MB"), Model()
    trainer(tmp_path, max_epochs=1).fit(model, data)
    assert sorted(flat(model.seen)) == list(data.datasets["train"].indices)
    assert isinstance(data.train_dataloader().sampler, DistributedSampler)  # whose epoch Lightning sets
    data.trainer = None
    assert isinstance(data.train_dataloader().sampler, RandomSampler)
    assert isinstance(data.val_dataloader().sampler, SequentialSampler)
    data.close()


def test_blocks_have_a_block_sampler(tmp_path):
    data = module(tmp_path)
    data.prepare_data()
    data.setup("fit")
    assert isinstance(data.train_dataloader().sampler, BlockSampler)
    assert list(data.val_dataloader().sampler) == list(range(len(data.datasets["val"])))
    data.close()


def parts_of(data):
    data.prepare_data()
    data.setup("fit")
    parts = {part: list(map(int, dataset.indices)) for part, dataset in data.datasets.items()}
    data.close()
    return parts


def test_shares_are_as_asked_for_and_the_same_each_time(tmp_path):
    parts = parts_of(module(tmp_path, split={"train": 0.5, "val": 0.25}))
    assert {part: len(indices) for part, indices in parts.items()} == {"train": 120, "val": 60}
    assert parts_of(module(tmp_path, split={"train": 0.5, "val": 0.25})) == parts
    assert parts_of(module(tmp_path, split={"train": 0.5, "val": 0.25}, seed=1)) != parts
    assert not set(parts["train"]) & set(parts["val"])


def test_stratified_parts_have_their_share_of_every_label(tmp_path):
    parts = parts_of(module(tmp_path, stratify=lambda info: info["labels"]))
    for part, share in {"train": 0.8, "val": 0.1, "test": 0.1}.items():
        counts = np.bincount(np.array(LABELS)[parts[part]])
        assert np.abs(counts - share * np.bincount(LABELS)).max() <= 1
    assert sorted(flat(parts.values())) == list(range(N))


def test_a_function_may_split(tmp_path):
    split = lambda info, length: {"train": range(length - 10), "test": range(length - 10, length)}
    parts = parts_of(module(tmp_path, split=split))
    assert parts == {"train": list(range(N - 10)), "test": list(range(N - 10, N))}
    data = module(tmp_path, split=split)
    data.setup("fit")
    with pytest.raises(LimitError, match="the split has no part 'val', it has"):
        data.val_dataloader()
    data.close()


def test_each_part_has_its_cache_and_its_transform(tmp_path):
    transforms = {"val": lambda sample: (sample[0].float(), sample[1])}
    data = module(tmp_path, size_limit_gib={"train": "20KB", "val": "1MB"}, transforms=transforms)
    data.prepare_data()
    data.setup("fit")
    assert all(isinstance(data.datasets[part], CachedDataset) for part in ("train", "val"))
    assert isinstance(data.datasets["test"], StorageDataset)
    assert data.datasets["val"][0][0].dtype == torch.float32
    assert data.datasets["train"].stats().total.capacity_bytes < data.datasets["val"].stats().total.dataset_len * 20_000
    data.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": {"train": 0.8, "valid": 0.2}}, r"split has the parts \['valid'\]; there are train, val, test"),
        ({"split": {"train": 0.8, "val": 0.3}}, "add up to at most 1"),
        ({"split": {"train": -0.1}}, "between 0 and 1"),
        ({"size_limit_gib": {"training": 1}}, r"size_limit_gib has the parts \['training'\]"),
        ({"transforms": {"x": str}}, r"transforms has the parts \['x'\]"),
    ],
)
def test_wrong_options_are_errors(tmp_path, options, message):
    with pytest.raises(LimitError, match=message):
        module(tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": lambda info, length: {"train": [0, 1], "val": [1]}}, "a sample of 'val' is in two parts"),
        ({"split": lambda info, length: {"train": [0, 0]}}, "or twice in this one"),
        ({"split": lambda info, length: {"train": [N]}}, "the split's train"),
        ({"split": lambda info, length: {"all": [1]}}, r"parts \['all'\]"),
        ({"stratify": lambda info: [1]}, f"stratify gives 1 labels of {N} samples"),
    ],
)
def test_wrong_splits_are_errors(tmp_path, options, message):
    data = module(tmp_path, **options)
    data.prepare_data()
    with pytest.raises((LimitError, IndexError), match=message):
        data.setup("fit")
    data.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_trainer_resumes_within_an_epoch(tmp_path, workers):
    checkpoints = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=7, save_top_k=-1)
    data, model = module(tmp_path, num_workers=workers), Model()
    trainer(tmp_path, max_epochs=2, callbacks=[checkpoints], enable_checkpointing=True).fit(model, data)
    data.close()
    for step in (7, 28):
        again, resumed = module(tmp_path, num_workers=workers), Model()
        trainer(tmp_path, max_epochs=2).fit(resumed, again, ckpt_path=tmp_path / f"step={step}.ckpt", weights_only=False)
        assert resumed.seen == model.seen[step:]
        again.close()


def test_a_checkpoint_of_another_split_is_an_error(tmp_path):
    checkpoints = ModelCheckpoint(tmp_path, "last", every_n_train_steps=7)
    data = module(tmp_path)
    trainer(tmp_path, max_epochs=1, callbacks=[checkpoints], enable_checkpointing=True).fit(Model(), data)
    data.close()
    other = module(tmp_path, seed=1)
    other.setup("fit")
    with pytest.raises(StateError, match=r"another split, with other samples in \['train', 'val', 'test'\]"):
        trainer(tmp_path, max_epochs=2).fit(Model(), other, ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    other.close()


def test_what_is_not_a_state_of_a_module_is_refused(tmp_path):
    data = module(tmp_path)
    before = json.loads(json.dumps(data.state_dict()))
    data.prepare_data()
    data.setup("fit")
    state = json.loads(json.dumps(data.state_dict()))
    for accepted in (before, state):
        data.load_state_dict(accepted)
    for wrong, message in (
        ({"train": "0" * 16}, "is not a state of a DataModule"),  # as an older release saved it
        (state | {"version": 1}, "this state has version 1"),
        (state | {"parts": {"split": None}}, "split=None"),
        (state | {"parts": {"split": {"train": object()}}}, "another split"),
    ):
        with pytest.raises(StateError, match=message):
            data.load_state_dict(wrong)
    data.close()


def test_the_monitor_logs_each_epoch_to_any_logger(tmp_path):
    data = module(tmp_path, size_limit_gib="6KB")
    logger = CSVLogger(tmp_path)
    fit = trainer(tmp_path, max_epochs=3, logger=logger, callbacks=[CacheMonitor()], log_every_n_steps=1)
    fit.fit(Model(), data)
    rows = [line.split(",") for line in Path(logger.log_dir, "metrics.csv").read_text().splitlines()]
    table = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    share = data.datasets["train"].stats().total.fill_fraction
    assert [int(row["epoch"]) for row in table] == [0, 1, 2]
    assert 0.2 < share < 0.8
    for row in table[1:]:
        assert float(row["cache/hit_rate"]) == pytest.approx(share)
        assert float(row["cache/fill"]) == pytest.approx(share)
        assert float(row["cache/waited_s"]) > 0
    data.close()


DDP = """
import json, sys
from pathlib import Path
from stocache.datamodule import CacheMonitor
from tests.support.processes import leave_process_group
from tests.support.training import Model, module, trainer

if __name__ == "__main__":
    folder = sys.argv[1]
    data, model = module(folder, num_workers=1, stratify=lambda info: info["labels"]), Model()
    fit = trainer(folder, max_epochs=2, strategy="ddp", devices=2, callbacks=[CacheMonitor()])
    fit.fit(model, data)
    stats = data.datasets["train"].stats().total
    found = {"seen": model.seen, "validated": model.validated, "filled": stats.filled, "fills": stats.fills}
    found["train"], found["val"] = (list(map(int, data.datasets[part].indices)) for part in ("train", "val"))
    Path(folder, f"rank{fit.global_rank}.json").write_text(json.dumps(found))
    fit.strategy.barrier()
    data.close()
    leave_process_group()
"""


@pytest.mark.slow
def test_two_ranks_share_the_samples_and_one_cache(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(DDP)
    root = Path(__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, script, tmp_path], cwd=root, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    train = ranks[0]["train"]
    for epoch in range(2):
        shares = [flat(rank["seen"][epoch * 12 : epoch * 12 + 12]) for rank in ranks]
        assert len(shares[0]) == len(shares[1]) == len(train) // 2
        assert len(set(shares[0] + shares[1])) == len(train) // 2 * 2  # one is left out, and each time another
        assert set(shares[0] + shares[1]) <= set(train)
    assert sorted(ranks[0]["validated"] + ranks[1]["validated"]) == sorted(ranks[0]["val"] * 2)
    assert [rank["filled"] for rank in ranks] == [len(train)] * 2  # blocks are admitted whole
    assert [rank["fills"] for rank in ranks] == [len(train)] * 2  # by both together: it is one cache
