"""Make samples in two parts: what a cut puts before the cache, and the rest, which runs each time.

NOTE [ Cut programs ]
    A dataset's program is a function of the index up to the first statement that draws random numbers. Its variables there are
    cached, and the rest runs each time, as the dataset's own code on copies of these values. So the samples stay the same, bit
    for bit, and so do the random numbers.

    Before that, some samples are made in both ways, with several seeds, and are compared (planning.py). Each later load is
    watched: if it draws, or fails, the dataset makes that sample itself each time, and it is not cached. After three loads that
    drew, no more are cached.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from stocache.datasets.cut.division import Division
from stocache.datasets.cut.program import Program
from stocache.datasets.cut.source import CannotCut
from stocache.datasets.cut.tree import DatasetTree
from stocache.datasets.transforms.huggingface import ReadTransform, find_read_transform
from stocache.system.generators import Kept, in_worker_thread
from stocache.system.loading.code import own_generators

logger = logging.getLogger("stocache")

_MOST_DRAWS = 3  # loads that draw, after which none is cached


class CutPlan(NamedTuple):
    """How the samples of one kind of dataset are made in two parts.

    Attributes:
        division: where its program is divided; None if it is not.
        identity: a text that is equal if the same part is cached.
        encoded: whether files are cached undecoded, and decoded after the cache.
        reads: whether the dataset is one of Hugging Face that transforms samples when they are read.
    """

    division: Division | None = None
    identity: str = "all"
    encoded: bool = False
    reads: bool = False


class UnplannedSample:
    """Takes the place of a sample that cannot be cached: the dataset makes it in `finish`."""

    def __reduce__(self) -> Any:
        raise TypeError("it was made in another way than those that were probed")


class BoundCut:
    """A plan, applied to one dataset in one process.

    Args:
        dataset: makes the samples.
        plan: where its program is divided.
        generators: that its program may draw from.
    """

    def __init__(self, dataset: Any, plan: CutPlan, generators: Sequence[Any] = ()) -> None:
        self.dataset, self.plan, self._drawn = dataset, plan, 0
        self._program = None if plan.division is None else Program(plan.division)
        self._calls_several = plan.division is not None and len(plan.division.inner) > 1
        self._own = generators if self._program else ()

    def load(self, idx: int) -> Any:
        """Return the part of sample ``idx`` that is cached."""
        if self._program is None:
            return self.dataset[idx]
        if self._drawn >= _MOST_DRAWS:
            return UnplannedSample()
        before = Kept(self._own, not in_worker_thread())
        try:
            state = self._program.first(self.dataset, idx)
        except Exception as error:  # the sample is made in a different way; or loading fails, and will fail again
            logger.debug("sample %d of %s: %s", idx, type(self.dataset).__name__, repr(error))
            state = UnplannedSample()
        if before.drawn():
            state = UnplannedSample()
            before.restore()
            self._drawn += 1
            if self._drawn == _MOST_DRAWS:
                logger.warning(
                    "random numbers are drawn to load sample %d of %s before the cut, where the probed samples draw none. No "
                    "further samples are cached by this process.", idx, type(self.dataset).__name__,
                )  # fmt: skip
        return state

    def finish(self, idx: int, sample: Any) -> Any:
        """Return sample ``idx``, of which a part was cached, after the rest of its program."""
        if type(sample) is UnplannedSample:
            return self.dataset[idx]
        if self._program is None:
            return sample
        before = Kept(self._own, not in_worker_thread()) if self._calls_several else None
        try:
            return self._program.second(self.dataset, sample, idx)
        except CannotCut:  # before anything was drawn, if only one call is divided
            if before is not None:
                before.restore()
            return self.dataset[idx]


class Split:
    """How the samples of a dataset are made: a part that is cached, and the rest.

    Args:
        dataset: makes the samples.
        plans: for each kind of leaf, by the number of the first leaf of its kind.
        tree: the leaves of the dataset; None finds them.
        text: where the program is cut, for the user.

    Attributes:
        has_rest: whether anything runs after the cache.
        saved_s: seconds that a cached part saves at least, of each sample; None if that was not measured.

    It pickles as the dataset and the plans. It has slots to hide its attributes from libraries that walk through the attributes
    of a dataset and seed the objects that they find (MONAI).
    """

    __slots__ = ("_bound", "_dataset", "_tree", "has_rest", "plans", "saved_s", "text")
    _holds_dataset = True

    def __init__(self, dataset: Any, plans: Mapping[int, CutPlan], tree: DatasetTree | None = None, text: str = "") -> None:
        self._dataset, self.plans, self._tree, self.text = dataset, dict(plans), tree, text
        self._bound: list[BoundCut | ReadTransform] = []  # one for each leaf
        self.saved_s: float | None = None
        self.has_rest = any(plan.division is not None or plan.reads for plan in self.plans.values())

    def __reduce__(self) -> Any:
        return Split, (self._dataset, self.plans, None, self.text)

    def bind(self) -> DatasetTree:
        """Find the leaves of the dataset now; else that is done when the first sample is made."""
        tree = self._tree
        if tree is None or not self._bound:
            tree = self._tree = tree or DatasetTree(self._dataset)
            generators = own_generators(self._dataset) if self.has_rest else []
            pairs = [(leaf, self.plans[kind]) for leaf, kind in zip(tree.leaves, tree.kinds, strict=True)]
            reads = [find_read_transform(leaf, plan.encoded) if plan.reads else None for leaf, plan in pairs]
            self._bound = [read or BoundCut(*pair, generators) for read, pair in zip(reads, pairs, strict=True)]
        return tree

    def load(self, idx: int) -> Any:
        """Return the part of sample ``idx`` that is cached."""
        number, leaf_idx = self.bind().locate(idx)
        return self._bound[number].load(leaf_idx)

    def finish(self, idx: int, sample: object) -> Any:
        """Return sample ``idx`` after the rest of its program."""
        number, leaf_idx = self.bind().locate(idx)
        return self._bound[number].finish(leaf_idx, sample)

    def load_many(self, indices: list[int]) -> Iterable[Any]:
        """Return, or yield, the parts of the samples ``indices`` that are cached."""
        tree, reader = self.bind(), self._reader
        return map(self.load, indices) if reader is None else reader.load_many([tree.locate(idx)[1] for idx in indices])

    def finish_many(self, indices: Sequence[int], samples: Iterable[object]) -> Iterable[Any]:
        """Return, or yield, the samples ``indices`` after the rest of their program."""
        reader = self._reader
        return map(self.finish, indices, samples) if reader is None else reader.finish_many(list(samples))

    @property
    def _reader(self) -> ReadTransform | None:
        """The leaf that makes the samples of a batch together; None if samples are made one by one."""
        tree, first = self.bind(), self._bound[0]
        return first if isinstance(first, ReadTransform) and tree.batches else None

    @property
    def takes_batches(self) -> bool:
        """Whether a transform gets whole batches."""
        return self._reader is not None and self._reader.function is not None

    def before_text(self) -> str:
        """Return what runs before the cache as text, the same in every process; empty if all of it does."""
        return "; ".join(plan.identity for plan in self.plans.values()) if self.has_rest else ""
