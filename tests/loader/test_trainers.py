"""Lightning takes the DataLoader for what it is: torch's."""

import gc
import multiprocessing
import socket
import warnings
from functools import partial
from itertools import islice

import pytest
import torch
from torch.utils.data import DistributedSampler

import stocache
from stocache import CachedDataset
from tests.support.images import Images
from tests.support.processes import run_all

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.leaves_descriptors,  # their loggers, and multiprocessing's server
]


@pytest.fixture
def loader():
    with CachedDataset(Images(), 1) as dataset:
        yield stocache.DataLoader(dataset, 8, shuffle=True, num_workers=2, persistent_workers=True)
        gc.collect()


def test_lightning_trains_with_it(loader, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = torch.nn.Linear(192, 1), []

        def training_step(self, batch, number):
            images, labels = batch
            self.seen.append(labels.tolist())
            return self.layer(images.float().flatten(1)).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    model = Model()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", default_root_dir=tmp_path, **options)
    trainer.fit(model, loader)
    for epoch in (model.seen[:7], model.seen[7:]):
        assert sorted(label for labels in epoch for label in labels) == list(range(50))
    assert loader.stats().ring >= 14
    del trainer, model


def test_lightning_makes_it_again_with_another_sampler(loader):
    data = pytest.importorskip("lightning.pytorch.utilities.data")
    first = data._update_dataloader(loader, DistributedSampler(loader.dataset, 2, 0))
    again = data._update_dataloader(first, DistributedSampler(loader.dataset, 2, 1))
    assert type(again) is stocache.DataLoader
    assert (again.num_workers, again.persistent_workers, again.batch_size) == (2, True, 8)
    assert again.collate_fn is loader.collate_fn
    labels = [label for part in (first, again) for _, labels in part for label in labels.tolist()]
    assert sorted(labels) == list(range(50))
    assert again.stats().ring == 4


PERSISTENT = {"num_workers": 2, "persistent_workers": True}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("distributed", {}),
        ("block", {}),
        ("module", {}),
        pytest.param("module, blocks", {}, marks=pytest.mark.slow),
        pytest.param("module, blocks", PERSISTENT, marks=pytest.mark.slow),
        pytest.param("locality", {}, marks=pytest.mark.slow),
        pytest.param("distributed", PERSISTENT, marks=pytest.mark.slow),
        pytest.param("block", {"num_workers": 2}, marks=pytest.mark.slow),
    ],
)
def test_lightning_resumes_at_every_step_and_epoch(kind, options, tmp_path):
    pytest.importorskip("lightning")
    from tests.support.lightning_fits import check_all_positions

    check_all_positions(tmp_path, kind, options)
    gc.collect()


SETTINGS = {
    "validation": {"val_check_interval": 0.5},
    "limit": {"limit_train_batches": 2},
    "accumulate": {"accumulate_grad_batches": 2},
    "reload": {"reload_dataloaders_every_n_epochs": 1},
}
SETTINGS["all"] = {name: value for settings in SETTINGS.values() for name, value in settings.items()}


@pytest.mark.parametrize("options", [{}, pytest.param(PERSISTENT, marks=pytest.mark.slow)], ids=["alone", "workers"])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("distributed", "validation"),
        ("generator", "validation"),
        *(
            pytest.param(kind, name, marks=pytest.mark.slow)
            for kind in ("distributed", "generator", "block", "locality")
            for name in SETTINGS
            if name != "validation" or kind in ("block", "locality")
        ),
    ],
)
def test_lightning_resumes_with_settings_of_its_own(kind, settings, options, tmp_path):
    pytest.importorskip("lightning")
    from tests.support.lightning_fits import EPOCHS, SAMPLES, check_all_positions, samples_of

    seen = check_all_positions(tmp_path, kind, options, **SETTINGS[settings])
    if "limit_train_batches" not in SETTINGS[settings] and kind != "block":  # which drops the last batch
        assert all(samples_of(seen, epoch) == list(range(SAMPLES)) for epoch in range(EPOCHS))
    gc.collect()


FORKED = PERSISTENT | {"multiprocessing_context": "fork"}  # by default those of a spawned rank are spawned, too


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "settings"),
    [
        ("shuffled", {}, {}),
        ("locality", {}, {}),
        ("block", {}, {}),
        ("module, blocks", {}, {}),
        ("shuffled", FORKED, {}),
        *(("distributed", {}, settings) for settings in SETTINGS.values()),
    ],
)
def test_lightning_resumes_two_ranks(kind, options, settings, tmp_path):
    pytest.importorskip("lightning")
    from tests.support.lightning_fits import check_in_rank

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    run_all(
        multiprocessing.get_context("spawn"),
        2,
        partial(check_in_rank, **settings),
        tmp_path,
        port,
        [(kind, options)],
        timeout_s=300,
    )


@pytest.mark.parametrize("epoch", [0, 1, 2])
@pytest.mark.parametrize("delivered", [0, 1, 7])
def test_the_epoch_may_be_set_after_the_iterator_is_made(delivered, epoch):
    data = Images()

    def loader():
        return stocache.DataLoader(data, 8, sampler=DistributedSampler(data, 1, 0), num_workers=2)

    def labels(iterator):
        return [batch[1].tolist() for batch in iterator]

    def whole(epoch):
        fresh = loader()
        fresh.set_epoch(epoch)
        return labels(fresh)

    first = loader()
    first.sampler.set_epoch(1)
    iterator = iter(first)
    for _ in range(delivered):
        next(iterator)
    state = first.state_dict()
    resumed = loader()
    resumed.load_state_dict(state)
    iterator = iter(resumed)
    resumed.sampler.set_epoch(epoch)
    assert labels(iterator) == whole(epoch)[delivered if epoch == 1 else 0 :]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, PERSISTENT])
@pytest.mark.parametrize("kind", ["distributed", "generator"])
@pytest.mark.parametrize(("size", "delivered"), [(50, 3), (50, 7), (48, 6)])
def test_an_iterator_that_is_not_used_takes_the_resumed_epoch(size, delivered, kind, options):
    data = Images(size)

    def loader():
        sampling = {"sampler": DistributedSampler(data, 1, 0)}
        if kind == "generator":
            sampling = {"shuffle": True, "generator": torch.Generator().manual_seed(5)}
        return stocache.DataLoader(data, 8, **sampling, **options)

    first = loader()
    for _ in islice(first, delivered):
        state = first.state_dict()
    resumed = loader()
    resumed.load_state_dict(state)
    iter(resumed)
    for one in (first, resumed):
        one.set_epoch(1)
    assert [labels.tolist() for _, labels in resumed] == [labels.tolist() for _, labels in first]
    first.end_workers()
    resumed.end_workers()


def test_lightning_keeps_all_arguments_of_a_loader(loader):
    data = pytest.importorskip("lightning.pytorch.utilities.data")
    options = {"num_workers": 2, "prefetch_factor": 3, "drop_last": True, "timeout": 7, "snapshot_every_n_steps": 4}
    options |= {"multiprocessing_context": "spawn", "generator": torch.Generator()}
    made = stocache.DataLoader(loader.dataset, 8, shuffle=True, **options)
    again = data._update_dataloader(made, DistributedSampler(loader.dataset, 2, 0))
    for name in options:
        assert getattr(again, name) is getattr(made, name), name
