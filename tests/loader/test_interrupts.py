"""An interrupt at any line of the loader: the next epoch is whole, and the iterator either goes on without loss or raises.

Workers that ended between two loops are started anew.
"""

import contextlib
import itertools
import os
import signal
import sys

import pytest

import stocache
from stocache import CachedDataset, WorkerError
from tests.support.images import Images
from tests.support.processes import in_child
from tests.support.ranks import slow

PACKAGE = os.path.dirname(stocache.__file__)
N, BATCH = 24, 3
WHOLE = list(range(0, N, BATCH))


class Stop(Exception):
    """What a signal handler of the user's raises."""


class Interrupt:
    """Sends a signal at a line that this thread runs in the package."""

    def __init__(self, after):
        self.after, self.raised = after, False

    def __call__(self, frame, event, argument):
        return self.line if not self.raised and frame.f_code.co_filename.startswith(PACKAGE) else None

    def line(self, frame, event, argument):
        if event == "line" and not self.raised:
            self.after -= 1
            if self.after < 0:
                self.raised = True
                signal.raise_signal(signal.SIGUSR1)
        return self.line


def firsts(iterator):
    for batch in iterator:
        yield int(batch[1][0])


def interrupted(loader, error, after):
    """Return the batches before an interrupt, the iterator, and whether it came to the interrupt."""

    def handler(*_):
        raise error

    interrupt, got, iterator = Interrupt(after), [], None
    signal.signal(signal.SIGUSR1, handler)
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with contextlib.suppress(error):
            iterator = iter(loader)
            for first in firsts(iterator):
                got.append(first)
    finally:
        sys.settrace(before)
    return got, iterator, interrupt.raised


@pytest.mark.parametrize(("method", "step", "cached", "error"), [
    ("thread", 251, False, Stop), ("thread", 251, True, KeyboardInterrupt), slow("multiprocessing", 331, True, Stop),
    slow("multiprocessing", 331, False, KeyboardInterrupt),
])  # fmt: skip
def test_after_an_interrupt_the_next_epoch_is_whole_and_no_batch_is_lost_in_between(method, step, cached, error):
    assert in_child(lambda: interrupt_epochs(method, step, cached, error)) == 0  # what was being opened may stay open


def interrupt_epochs(method, step, cached, error):
    with CachedDataset(Images(N), 0.1) as dataset:
        list(dataset)
        for after in itertools.count(step, step):
            loader = stocache.DataLoader(
                dataset if cached else Images(N), batch_size=BATCH, num_workers=2, worker_method=method, persistent_workers=True
            )
            assert list(firsts(loader)) == WHOLE
            got, iterator, came = interrupted(loader, error, after)
            if not came:
                break
            try:
                rest = [] if iterator is None else list(firsts(iterator))
            except WorkerError:
                pass
            else:  # the batch in the loop's hands may be lost with the interrupt
                assert iterator is None or len(set(WHOLE) - {*got, *rest}) <= 1
            assert list(firsts(loader)) == WHOLE
            loader.end_workers()
        assert after > step


def test_persistent_workers_that_ended_between_two_loops_are_started_anew():
    loader = stocache.DataLoader(CachedDataset(Images(N), "1MB"), BATCH, num_workers=2, persistent_workers=True)
    next(iter(loader))
    for worker in loader._iterator._workers:
        os.kill(worker.pid, signal.SIGINT)
        worker.join(30)
    assert list(firsts(loader)) == list(firsts(loader)) == WHOLE
