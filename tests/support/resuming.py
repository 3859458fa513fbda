"""Objects with states, and loaders that resume at each of their states."""

import random

import torch
from torch.utils.data import Dataset

from tests.support.equality import same


class State:
    """Has some of its attributes as a state."""

    kept = ("at",)

    def state_dict(self):
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state):
        vars(self).update(state)


class Counting(State, Dataset):
    """A map-style dataset whose samples tell how many it has given."""

    kept = ("given",)
    given, broken = 0, None

    def __len__(self):
        return 23

    def __getitem__(self, idx):
        if idx == self.broken:
            raise KeyError("broken")
        self.given += 1
        return torch.tensor([idx, self.given])


def play(loader, epochs=1):
    """The batches of some epochs, and the state before and after each, and after the end; the generators at each state."""
    states, generators, batches = [], [], []

    def note():
        states.append(loader.state_dict())
        generators.append((torch.get_rng_state(), random.getstate()))

    note()
    for _ in range(epochs):
        for batch in loader:
            batches.append(batch)
            note()
    note()
    return batches, states, generators


def check_resumes(loader, resume, epochs=1, numbers=None):
    """Demand that ``resume(state)`` returns a loader that delivers what follows a state, and the epoch after that.

    Args:
        loader: is played for some epochs, and one more.
        numbers: of the states; None for all.
    """
    came, states, generators = play(loader, epochs)
    following, length = list(loader), len(came) // epochs
    for number in numbers(length, len(states)) if numbers else range(len(states)):
        resumed = resume(states[number])
        torch.set_rng_state(generators[number][0])  # a user's checkpoint has them
        random.setstate(generators[number][1])
        left = epochs - max(0, number - 1) // length
        assert same([batch for _ in range(left) for batch in resumed], came[number:]), number
        assert same(list(resumed), following), number
    return came
