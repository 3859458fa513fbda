"""Training loops of accelerate that record their samples, and that resume at any step."""

import gc
import os
from functools import partial

import accelerate
import torch
from accelerate.utils import set_seed
from torch.utils.data import DistributedSampler

import stocache
from stocache import CachedDataset
from tests.support.ranks import Numbers, of_all_ranks

SAMPLES, STEPS, EPOCHS = 10, 3, 2  # three batches of at most four samples in an epoch


def reset_states():
    """Let accelerate forget its configuration, which it keeps in the process."""
    gc.collect()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


class Program:
    """One start of a program: the model, the optimizer and the loader of ``kind``, as accelerate prepares them.

    ``kind``: "skipping" skips what was trained, with ``set_epoch`` and ``skip_first_batches``; "stateful" has accelerate save
    the loader that it prepared, with ``use_stateful_dataloader``; "registered" has accelerate save a loader of stocache that
    is not prepared, but registered.
    """

    def __init__(self, kind, dataset, batch_size, options, loader_class=stocache.DataLoader, **config):
        set_seed(0)
        self.kind = kind
        config |= {"use_seedable_sampler": True, "use_stateful_dataloader": kind == "stateful"}
        self.accelerator = accelerate.Accelerator(cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(**config))
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        sampling = {"shuffle": True} if kind != "registered" else {"sampler": DistributedSampler(dataset, ranks, rank, seed=5)}
        loader = loader_class(dataset, batch_size, **sampling, **options)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.loader = loader if kind == "registered" else self.accelerator.prepare(loader)
        if kind == "registered":
            self.accelerator.register_for_checkpointing(loader)

    def train(self, folder, epoch=0, skipped=0, checkpoint=None):
        """Train from an epoch on, and save each step in ``folder``; return the epoch and the samples of each step.

        Args:
            epoch, skipped: where to begin, after as many batches.
            checkpoint: number of the step whose checkpoint is loaded; None trains from the beginning, and saves.
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
    with CachedDataset(Numbers(SAMPLES), 1) as dataset:
        program = partial(Program, kind, dataset, batch_size, options, **config)
        whole = program().train(folder)
        assert len(whole) == STEPS * EPOCHS
        for done in range(1, len(whole)):
            epoch = (done - (kind == "registered")) // STEPS
            skipped = done % STEPS if kind == "skipping" else 0
            assert program().train(folder, epoch, skipped, done) == whole[done:], done
    return whole


def check_in_rank(rank, folder, cases):
    """Check cases in one rank of two; together the ranks see each sample in each epoch."""
    for number, (kind, options, config) in enumerate(cases):
        first, second = of_all_ranks(check_all_steps(os.path.join(folder, str(number)), kind, options, **config))
        for epoch in range(EPOCHS):
            seen = [label for at, labels in first + second if at == epoch for label in labels]
            assert set(seen) == set(range(SAMPLES))
            assert len(seen) <= SAMPLES + 2  # accelerate fills up the last batches
