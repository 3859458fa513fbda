"""Seeded trials whose counts are summed, and child processes that may die or stall."""

import multiprocessing
import operator
import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from benchmark.support.harness import Run
from benchmark.support.processes import fork, wait
from tests.support.epochs import Epoch
from tests.support.traces import mount_private

DIES, STALLS = "dies", "stalls"
"""What `in_child` yields last if the child does not end well."""

Trial = Callable[[int], Mapping[str, int]]
"""Called with a seed, returns counts; AssertionError: something is wrong."""

Step = Callable[[], object]
"""Called by a process before each step of its work."""


def kill_one(
    rng: random.Random, count: int, fill: Callable[[list[int], Step], object], steps: int, look: Callable[[], int]
) -> tuple[bool, int]:
    """Fork processes that fill something, kill one of them at a random moment, and have others finish the work.

    Args:
        rng: draws the moment, and whether there are two of them then.
        count: number of samples.
        fill: called with an order of all indices, and with a `Step`. So the moments do not depend on the speed of the machine.
        steps: how many steps there are.
        look: called after the kill; returns how much is there.

    Returns:
        Whether the process was killed before it was done, and what ``look`` has returned.
    """
    taken, tell = os.pipe()

    def start(step: Step = lambda: None) -> int:
        order = rng.sample(range(count), count)
        return fork(lambda: fill(order, step))

    victim = start(lambda: os.write(tell, b"x"))
    os.close(tell)
    others = [start() for _ in range(rng.randrange(2))]
    for _ in range(rng.randint(1, steps)):
        os.read(taken, 1)
    time.sleep(rng.random() ** 2 * 0.002)
    os.kill(victim, signal.SIGKILL)
    killed, there = os.WIFSIGNALED(wait(victim)), look()
    os.close(taken)
    assert not any(wait(pid) for pid in (*others, start())), "a survivor failed"
    return killed, there


def in_child(function: Callable[..., Iterator[Any]], *arguments: Any, patience_s: float = 60) -> Iterator[Any]:
    """Yield what a generator function yields in a forked child, and then `DIES` or `STALLS` if the child does not end well.

    ``patience_s``: how long the child may take for one value, and to end.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_send, args=(sender, function, arguments))
    child.start()
    sender.close()
    ending = STALLS
    try:
        while receiver.poll(patience_s):
            yield receiver.recv()
    except EOFError:
        child.join(patience_s)
        ending = STALLS if child.is_alive() else DIES if child.exitcode else ""
    finally:
        child.kill()
        child.join()
        receiver.close()
    if ending:
        yield ending


def _send(sender: Any, function: Callable[..., Iterator[Any]], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    for value in function(*arguments):
        sender.send(value)
    sender.close()


def holdings() -> str:
    """Return what is taken of /dev/shm and of the descriptor table."""
    names, descriptors = os.listdir("/dev/shm"), len(os.listdir("/proc/self/fd"))
    return f"/dev/shm names {names}, free blocks {os.statvfs('/dev/shm').f_bfree}, descriptors {descriptors}"


def trials(run: Run, cases: Mapping[str, Trial]) -> None:
    """Run a trial of each case with each seed; print the sums of the counts, and claim that nothing is wrong or left.

    Something is left if more of /dev/shm or more descriptors are taken at the end of a case than after its first trial.
    """
    mount_private()  # if that is allowed: other programs use /dev/shm, too
    rows, left = dict[str, Counter[str]](), 0
    for name, trial in run.chosen(dict(cases)).items():
        rows[name], before = Counter(trials=run.rounds), ""
        for seed in run.seeds():
            try:
                rows[name].update(trial(seed))
            except AssertionError:
                traceback.print_exc()
                print(f"{name}: seed {seed} is wrong")
                rows[name]["wrong"] += 1
            before = before or holdings()
        if (after := holdings()) != before:
            print(f"{name}: before {before}\n{name}: after  {after}")
            left += 1
    count_table(run, rows)
    run.claim("nothing is left in /dev/shm and the table of descriptors", not left)


def count_table(run: Run, rows: Mapping[str, Counter[str]]) -> None:
    """Print the counts of each case, and claim that nothing is wrong."""
    names = [*dict.fromkeys(name for counts in rows.values() for name in counts if name != "wrong"), "wrong"]
    table = run.table("", *names)
    for title, counts in rows.items():
        table.row(title, *map(counts.__getitem__, names))
    run.claim("nothing is wrong", not any(table.column("wrong")))


def differing(found: list[Epoch], expected: list[Epoch]) -> int:
    """Return how many samples, and states of generators after an epoch, differ between two runs of a loader."""
    one, other = map(_parts, (found, expected))
    return sum(map(operator.ne, one, other)) + abs(len(one) - len(other))


def _parts(epochs: list[Epoch]) -> list[str]:
    return [repr(part) for epoch in epochs for part in (*epoch.samples, epoch.generators)]
