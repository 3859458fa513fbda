"""Programs of accelerate resume at every step, with workers, several ranks, and each of its ways to resume."""

import os
from functools import partial

import pytest
import torch
from torch.utils.data import DistributedSampler

import stocache
from stocache import CachedDataset
from tests.support.ranks import numbers, of_all_ranks, reset_accelerate, run_ranks, samples_of

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

    def __init__(self, kind, dataset, batch_size, options, **config):
        accelerate.utils.set_seed(0)
        self.kind = kind
        config |= {"use_seedable_sampler": True, "use_stateful_dataloader": kind == "stateful"}
        self.accelerator = accelerate.Accelerator(cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(**config))
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        sampling = {"shuffle": True} if kind != "registered" else {"sampler": DistributedSampler(dataset, ranks, rank, seed=5)}
        loader = stocache.DataLoader(dataset, batch_size, **sampling, **options)
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
                    self.accelerator.wait_for_everyone()
        return seen


def check_all_steps(folder, kind, options, batch_size=4, **config):
    """Check that each step resumes with the samples that the uninterrupted run saw after it; return those of that run.

    The state of a registered loader belongs to the epoch in which it was taken, also after the last batch of it.
    """
    with CachedDataset(numbers(SAMPLES), 1) as dataset:
        program = partial(Program, kind, dataset, batch_size, options, **config)
        whole = program().train(folder)
        assert len(whole) == STEPS * EPOCHS
        for done in range(1, len(whole)):
            epoch = (done - (kind == "registered")) // STEPS
            skipped = done % STEPS if kind == "skipping" else 0
            assert program().train(folder, epoch, skipped, done) == whole[done:], done
    return whole


@pytest.fixture(autouse=True)
def _states_are_reset():
    reset_accelerate()
    yield
    reset_accelerate()


@pytest.mark.parametrize(("kind", "options"), [("stateful", {}), ("skipping", WORKERS), ("registered", PERSISTENT)])
def test_each_step_resumes(kind, options, tmp_path):
    if kind == "stateful":
        pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    whole = check_all_steps(tmp_path, kind, options)
    assert [samples_of(whole, epoch) for epoch in range(EPOCHS)] == [list(range(SAMPLES))] * EPOCHS


def check_in_rank(rank, folder, cases):
    """Check cases in one rank of two; together the ranks see each sample in each epoch."""
    for number, (kind, options, config) in enumerate(cases):
        first, second = of_all_ranks(check_all_steps(os.path.join(folder, str(number)), kind, options, **config))
        for epoch in range(EPOCHS):
            seen = samples_of(first + second, epoch)
            assert set(seen) == set(range(SAMPLES))
            assert len(seen) <= SAMPLES + 2  # accelerate fills up the last batches


def test_two_ranks_resume(tmp_path):
    cases = [("registered", {}, {"batch_size": 2}), ("skipping", {}, {"split_batches": True, "dispatch_batches": True})]
    run_ranks(check_in_rank, tmp_path, cases)
