"""Programs of accelerate resume at every step, with workers, and in each of its ways to resume."""

import os

import pytest
import torch
from torch.utils.data import DistributedSampler

import stocache
from stocache import CachedDataset
from tests.support.ranks import numbers, reset_accelerate, samples_of

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.leaves_descriptors]  # of its loggers

SAMPLES, STEPS, EPOCHS = 10, 3, 2  # three batches of at most four samples in an epoch
WORKERS = {"num_workers": 2}
PERSISTENT = {"num_workers": 2, "persistent_workers": True}


class Program:
    """One start of a program: the model, the optimizer and the loader of ``kind``, as accelerate prepares them.

    ``kind``: "skipping" skips what was trained, with ``set_epoch`` and ``skip_first_batches``; "stateful" has accelerate save
    the loader of torchdata that it makes of ours (which does not resume with workers); "registered" has it save ours.
    """

    def __init__(self, kind, dataset, options):
        accelerate.utils.set_seed(0)
        self.kind = kind
        config = {"use_seedable_sampler": True, "use_stateful_dataloader": kind == "stateful"}
        self.accelerator = accelerate.Accelerator(cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(**config))
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        sampling = {"shuffle": True} if kind != "registered" else {"sampler": DistributedSampler(dataset, 1, 0, seed=5)}
        loader = stocache.DataLoader(dataset, 4, **sampling, **options)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.loader = loader if kind == "registered" else self.accelerator.prepare(loader)
        if kind == "registered":
            self.accelerator.register_for_checkpointing(loader)

    def train(self, folder, epoch=0, skipped=0, checkpoint=None):
        """Train from an epoch on, after ``skipped`` batches of it; return the epoch and the samples of each step.

        ``checkpoint``: the step whose state is loaded from ``folder``; None trains from the beginning, and saves each step.
        """
        seen = []
        if checkpoint is not None and self.kind != "skipping":
            self.accelerator.load_state(os.path.join(folder, str(checkpoint)))
        for number in range(epoch, EPOCHS):
            self.loader.set_epoch(number)
            skips = skipped and number == epoch
            for values, labels in self.accelerator.skip_first_batches(self.loader, skipped) if skips else self.loader:
                seen.append((number, labels.tolist()))
                self.accelerator.backward(self.model(values).mean())
                self.optimizer.step()
                self.optimizer.zero_grad()
                if checkpoint is None and self.kind != "skipping":
                    self.accelerator.save_state(os.path.join(folder, str(len(seen))))
        return seen


@pytest.fixture(autouse=True)
def _states_are_reset():
    reset_accelerate()
    yield
    reset_accelerate()


@pytest.mark.parametrize(("kind", "options"), [("stateful", {}), ("skipping", WORKERS), ("registered", PERSISTENT)])
def test_each_step_resumes_with_the_samples_that_the_uninterrupted_run_saw_after_it(kind, options, tmp_path):
    """The state of a registered loader belongs to the epoch in which it was taken, also after the last batch of it."""
    if kind == "stateful":
        pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    with CachedDataset(numbers(SAMPLES), 0.1) as dataset:
        whole = Program(kind, dataset, options).train(tmp_path)
        assert [samples_of(whole, epoch) for epoch in range(EPOCHS)] == [list(range(SAMPLES))] * EPOCHS
        for done in range(1, len(whole)):
            epoch = (done - (kind == "registered")) // STEPS
            skipped = done % STEPS if kind == "skipping" else 0
            assert Program(kind, dataset, options).train(tmp_path, epoch, skipped, done) == whole[done:], done
