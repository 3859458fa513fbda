"""Plan where the program of a dataset is cut, from measurements and trials before the user's own loop.

NOTE [ Where to cut ]
    A later cut saves more work, but may need more memory: a float tensor has four times the bytes of its image. The usual
    choice is the latest cut at which all samples fit, or if there is no such cut, the one with the smallest samples. If another
    cut saves more than twice as much, that is taken: the path of an image is smaller than the image, but caching it saves next
    to nothing.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch.utils.data import Dataset

from stocache.cache.options import SampleOptions
from stocache.datasets.cut.program import steps_of
from stocache.datasets.cut.source import CannotCut
from stocache.datasets.cut.split import CutPlan, Split
from stocache.datasets.cut.surveying import Example, Loaded, Option, Survey, finish_parts, survey
from stocache.datasets.cut.tree import DatasetTree
from stocache.datasets.transforms.huggingface import find_read_transform
from stocache.samples.indices import spread
from stocache.samples.record_decoder import pack_sample, unpack_sample
from stocache.system.describe import difference
from stocache.system.figures import format_seconds
from stocache.system.limits import format_size
from stocache.system.loading.fallback import in_children_or_here
from stocache.system.objects import attribute_of, vars_of
from stocache.system.walking import makers

logger = logging.getLogger("stocache")

_EXAMPLES = 3  # samples of each kind of leaf that are tried out, at least
_SEARCHED = 4096  # samples whose leaves are searched for all kinds
_MAX_KINDS = 8  # of leaves
_MOST_ATTEMPTS = 3
_PATIENCE_S = 120.0  # for one sample
_NEGLIGIBLE_S = 1e-4  # of saved time per sample

ENCODED = (
    "store='encoded' is for datasets that load each file by an attribute `loader`, called with its path, as torchvision's "
    "folders do; with {} it does not work: {}. Leave store= out; or have your dataset return the bytes of its files, and "
    "decode them in transform=."
)


def holds_pipelines(dataset: object) -> bool:
    """Return whether a dataset, or one within it, holds known transforms."""
    held = [value for leaf in makers(dataset) for value in vars_of(leaf).values() if not isinstance(value, Dataset)]
    return any(callable(value) and steps_of(value, ()) is not None for value in held)


class Planner:
    """Finds the cuts of a dataset's program.

    Attributes:
        reads: whether a dataset of Hugging Face transforms, or decodes, samples when they are read.

    Args:
        length: samples of the dataset.
        limit: bytes of the cache.
        options: say where to cut, what to hoist, and how many samples to load.
        wanted: the `Split.before_text` that is hoped for.
    """

    def __init__(self, dataset: object, length: int, limit: int, options: SampleOptions, wanted: str | None) -> None:
        self._dataset, self._cut, self._wanted, self._hoists = dataset, options.cut, wanted, options.split != "straight"
        self._room = limit / (length * 1.02)  # bytes for a sample
        self._tree, self._encoded = DatasetTree(dataset), (encoded := options.store == "encoded")
        self._read = {kind for kind in self._tree.kinds if find_read_transform(self._tree.leaves[kind], encoded) is not None}
        kinds, self._problem, self._examples = {*self._tree.kinds}, "", dict[int, list[Example]]()
        if encoded and not self._read and not all(map(_has_loader, self._tree.leaves)):
            self._problem = "it has no loader"
        elif len(kinds) > _MAX_KINDS:
            self._problem = f"there are {len(kinds)} kinds of datasets within it"
        else:
            self._examples = _choose_examples(self._tree, length, options.probe)
            self._problem = "some datasets within it have no samples here" * (self._examples.keys() != kinds)
        self.reads = bool(self._read)
        self._loaded, self._surveys = dict[Example, tuple[Any, ...]](), dict[int, Survey]()
        self._chosen: dict[int, Option] = {}

    def _survey(self, forced: bool) -> Iterator[Any]:
        """Load samples to find where the program can be cut, and yield what they show. For a child process."""
        how = "loader" if self._encoded else "pipelines" if forced else None
        every = self._cut is not None or self._wanted is not None
        for kind, examples in self._examples.items() if not self._problem else ():
            if kind not in self._read:
                yield from survey(self._tree, kind, examples, how, self._hoists, self._room, every)

    def find(self, forced: bool, look: Callable[[Split, list[int]], Any]) -> tuple[Split, Any]:
        """Return the best split that is right, and the parts of the probed samples that are cached.

        Args:
            forced: cut at the first known transforms, or at the loader of files, whether or not these draw.
            look: called with a split and the samples that were loaded here; loads the parts of these, and others, that are
                cached, in another process, and returns a `Probe`.

        Raises:
            CannotCut: there is none.
            SlowError: a sample takes too long.
        """
        for item in in_children_or_here(self._dataset, [partial(self._survey, forced)], patience_s=_PATIENCE_S):
            if isinstance(item, Survey):
                self._surveys[item.kind] = item
            elif isinstance(item, Loaded):
                self._loaded[item.example] = item.descriptions
        problems = [self._problem, *(found.problem for found in self._surveys.values() if not found.options)]
        problem = next(filter(None, problems), None)
        rest = {kind: list(found.options) for kind, found in self._surveys.items() if found.options}
        for _ in range(_MOST_ATTEMPTS if problem is None else 0):
            self._chosen = {kind: self._choose(options) for kind, options in rest.items()}
            plans = {kind: CutPlan() for kind in self._surveys} | {kind: its.plan for kind, its in self._chosen.items()}
            plans |= {kind: CutPlan(identity="columns", encoded=self._encoded, reads=True) for kind in self._read}
            split = Split(self._dataset, dict(sorted(plans.items())), self._tree, self._text())
            probe = look(split, [example.idx for example in self._loaded])
            try:
                if probe.finding is not None:
                    raise CannotCut(probe.finding)
                self._prove(split, probe)
            except CannotCut as error:
                problem = problem or str(error)
            else:
                split.saved_s = min((option.saved_s for option in self._chosen.values()), default=None)
                self._report(split)
                return split, probe
            rest = {kind: [option for option in options if option != self._chosen[kind]] for kind, options in rest.items()}
            if not rest or not all(rest.values()):
                break
        raise CannotCut(problem or "no child process can load its samples")

    def _choose(self, options: Sequence[Option]) -> Option:
        """Return the option to take, of some with the latest cut first; see NOTE [ Where to cut ]."""
        for option in options:
            if self._wanted is not None and option.plan.identity in self._wanted:
                return option
        if self._cut == "latest":
            return options[0]
        smallest = min(options, key=lambda option: option.size)  # of equal ones, the latest
        if self._cut == "smallest":
            return smallest
        usual = next((option for option in options if self._share(option) == 1.0), smallest)
        best = max(options, key=self._saved_s)
        saves_more = self._saved_s(best) > max(2 * self._saved_s(usual), self._saved_s(usual) + _NEGLIGIBLE_S)
        return best if saves_more else usual

    def _share(self, option: Option) -> float:
        """Return the share of the samples that is cached."""
        return min(1.0, self._room / max(1.0, option.size))

    def _saved_s(self, option: Option) -> float:
        return self._share(option) * option.saved_s

    def _prove(self, split: Split, probe: Any) -> None:
        """Compare samples that are made in two parts with the samples of the dataset; see NOTE [ Trials ].

        Args:
            probe: the parts to cache, which another process has made.

        Raises:
            CannotCut: they differ.
        """
        for example in self._loaded:
            if example.idx in probe.errors:
                raise CannotCut(f"sample {example.idx} draws random numbers before the cut, or is made in another way")
        tried = [example for example in self._loaded if example.idx in probe.samples]
        parts = [(example, partial(unpack_sample, pack_sample(probe.samples[example.idx]))) for example in tried]
        counts = {example: len(its) for example, its in self._loaded.items()}
        job: Any = partial(finish_parts, split, parts, counts)
        reads, sets = (set[str]().union(*(its.attributes[at] for its in self._chosen.values())) for at in (0, 1))
        results = in_children_or_here(self._dataset, [job], patience_s=_PATIENCE_S) if parts else ()
        for example, again, description, (reads_after, sets_after) in results:
            if both := sets & reads_after | (sets_after - sets) & reads:  # the first may read what it has set itself
                raise CannotCut(f"one of its halves sets {min(both)}, which the other one reads")
            if (place := difference(self._loaded[example][again], description)) is not None:
                raise CannotCut(f"sample {example.idx} would not be the same ({place:.200})")

    def _text(self) -> str:
        texts = [f"cached: {option.before}; run each time: {option.after}" for option in self._chosen.values()]
        for read in (find_read_transform(self._tree.leaves[kind], self._encoded) for kind in self._read):
            texts += [] if read is None else [f"cached: the columns; run each time: {', '.join(read.rest)}"]
        return ". ".join(dict.fromkeys(texts))

    def _report(self, split: Split) -> None:
        """Say where the program is cut."""
        figures = [f"{format_size(its.size)} a sample, saves {format_seconds(its.saved_s)}" for its in self._chosen.values()]
        logger.info("%s%s", split.text, f" ({'; '.join(figures)})" if figures else "")


def _has_loader(leaf: object) -> bool:
    return callable(attribute_of(leaf, "loader")) and "loader" in vars_of(leaf)


def _choose_examples(tree: DatasetTree, length: int, count: int) -> dict[int, list[Example]]:
    """Return the samples to try for each kind of leaf: of ``count`` evenly spread ones, and more of rare kinds."""
    searched, probed = {*spread(length, _SEARCHED)}, {*spread(length, count)}
    found: dict[int, list[int]] = {}
    for idx in sorted({*searched, *probed, *(start for start in tree.starts if start < length)}):
        found.setdefault(tree.kinds[tree.locate(idx)[0]], []).append(idx)
    examples: dict[int, list[Example]] = {}
    for kind, samples in found.items():
        chosen = probed & {*samples}
        if len(chosen) < _EXAMPLES:
            chosen |= {samples[at] for at in spread(len(samples), _EXAMPLES)}
        examples[kind] = [Example(idx, turn) for turn, idx in enumerate(sorted(chosen))]
    return examples
