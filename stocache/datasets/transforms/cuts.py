"""Find the cuts at which transforms can be divided, what each costs and saves, and choose one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from stocache.datasets.transforms.patching import Site
from stocache.datasets.transforms.trials import (
    DIFFERENT_CALLS,
    CannotSplit,
    MeasuredCall,
    MeasuredSample,
)
from stocache.errors import DatasetError

Cut: TypeAlias = Literal["latest", "smallest"] | None


SET_EARLIER = "Set it before CachedDataset, or make a new one."
NEGLIGIBLE_S = 1e-4  # of saved time per sample


class Option(NamedTuple):
    """A place to cut: the cut of each transform that is called, the bytes of a sample, and the seconds a cached one saves."""

    cuts: dict[Site, int]
    size: float
    saved_s: float


_Chain: TypeAlias = list[list[MeasuredCall]]
"""Transforms that are called one after another on one part of the samples: for each, its call in each example."""


def _mean(numbers: Sequence[Any]) -> float:
    return float(np.mean(numbers))


def find_chains(samples: Sequence[MeasuredSample]) -> list[_Chain]:
    """Return the chains of transforms that are called alike in all samples; none where the calls differ."""
    structures = [[(call.site, call.style, call.upstream) for call in sample.calls] for sample in samples]
    if any(structure != structures[0] for structure in structures):
        raise CannotSplit(DIFFERENT_CALLS)
    calls = [list(same_call) for same_call in zip(*(sample.calls for sample in samples), strict=True)]
    chains = []
    for last in set(range(len(calls))) - {upstream for _, _, upstream in structures[0]}:
        chain, at = _Chain(), structures[0][last][2]
        chain.append(calls[last])
        while at is not None:
            chain.insert(0, calls[at])
            at = structures[0][at][2]
        chains.append(chain)
    return chains


def _chain_options(chain: _Chain) -> list[Option]:
    """Return where to cut a chain, as one transform with all its steps, the earliest first; None where it cannot be cached."""
    cuts, seconds = {calls[0].site: 0 for calls in chain}, 0.0
    options = []
    for calls in chain:
        deterministic = min(len(call.seconds) for call in calls)
        for cut in range(calls is not chain[0], deterministic + 1):
            cuts = {**cuts, calls[0].site: cut}
            seconds += _mean([call.seconds[cut - 1] for call in calls]) if cut else 0.0
            sizes = [call.sizes[cut] for call in calls]
            if None not in sizes:
                options.append(Option(cuts, _mean(sizes), seconds))
        if deterministic < calls[0].steps:
            break
    if not options:
        raise CannotSplit("the input of its transforms cannot be cached")
    return options


def fixed_option(chains: Sequence[_Chain], before: Mapping[Site, int], size: float) -> Option:
    """Return the cuts that leave cached samples valid.

    Raises:
        DatasetError: there are no such cuts.
    """
    cuts: dict[Site, int] = {}
    for chain in chains:
        wanted = {calls[0].site: before.get(calls[0].site, 0) for calls in chain}
        if wanted not in [option.cuts for option in _chain_options(chain)]:
            raise DatasetError(
                f"{', '.join(map(str, wanted))} cannot be set: the samples that are cached were made with other transforms, or "
                f"later ones. {SET_EARLIER}"
            )
        cuts |= wanted
    return Option(cuts, size, 0.0)


def find_options(samples: Sequence[MeasuredSample], chains: Sequence[_Chain]) -> list[Option]:
    """Return where to cut, the latest first. All transforms but those of the largest part are cut as late as possible."""
    size = _mean([sample.size for sample in samples])
    if not chains:
        return [Option({}, size, 0.0)]
    other_size = max(0.0, size - sum(_mean([call.result_size for call in chain[-1]]) for chain in chains))
    own_times = [sample.load_s - sum(call.total_s for call in sample.calls) for sample in samples]
    own_s = max(0.0, float(np.median(own_times)))  # without the transforms
    possible = list(map(_chain_options, chains))
    main = max(possible, key=lambda options: options[-1].size)
    options = []
    for position in range(len(main) - 1, -1, -1):
        total = Option({}, other_size, own_s)
        for choices in possible:
            same = choices[0].cuts.keys() == main[0].cuts.keys()  # one transform, several images
            chosen = choices[min(position, len(choices) - 1) if same else -1]
            cuts = {site: min(cut, total.cuts.get(site, cut)) for site, cut in chosen.cuts.items()}
            total = Option(total.cuts | cuts, total.size + chosen.size, total.saved_s + chosen.saved_s)
        options.append(total)
    return options


def choose_option(options: Sequence[Option], cut: Cut, share: Callable[[float], float]) -> Option:
    """Return the option to take; see NOTE [ Where to cut ].

    Args:
        options: the latest cut first.
        cut: the argument of the user.
        share: called with the bytes of a sample; returns the share of the samples that is cached.
    """
    if cut == "latest":
        return options[0]
    smallest = min(options, key=lambda option: option.size)  # of equal ones, the latest
    if cut == "smallest":
        return smallest

    def saved_s(option: Option) -> float:
        return share(option.size) * option.saved_s

    usual = next((option for option in options if share(option.size) == 1.0), smallest)
    best = max(options, key=saved_s)
    return best if saved_s(best) > 2 * saved_s(usual) and saved_s(best) - saved_s(usual) > NEGLIGIBLE_S else usual
