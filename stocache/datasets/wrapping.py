"""Prepare a dataset for caching: look at some samples, plan where its program is cut, and make the cache."""

import contextlib
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from stocache.cache.disk.cache import DiskCache
from stocache.cache.disk.folder import manifest_of
from stocache.cache.disk.formats import known_example
from stocache.cache.options import CacheOptions, SampleOptions
from stocache.cache.placement import Placement
from stocache.cache.ragged import RaggedCache
from stocache.cache.shared import SharedCache
from stocache.cache.stats import MISSING, SlotState
from stocache.datasets.cut.planning import ENCODED, Planner, holds_pipelines
from stocache.datasets.cut.source import CannotCut
from stocache.datasets.cut.split import Split
from stocache.datasets.loaders import BlockLoader, SampleLoader, admission_unit, choose_blocks
from stocache.datasets.probing import Probe, probe_samples
from stocache.datasets.proof import proof_of
from stocache.errors import DatasetError, LimitError, MismatchError, SampleError
from stocache.samples.codecs import Codec
from stocache.samples.indices import check_len
from stocache.samples.leaves.kinds import NarrowKind
from stocache.samples.record_encoder import RecordEncoder
from stocache.samples.spec import Structure
from stocache.shm import registry, siblings
from stocache.shm.named import FINGERPRINT_STEPS_SEPARATOR, identity_of
from stocache.system.limits import format_size, parse_size, recommended_limit
from stocache.system.loading.children import SlowError
from stocache.system.loading.streams import find_stream
from stocache.system.objects import static_attribute

logger = logging.getLogger("stocache")


_MANY = 1 << 26  # samples; a table of fewer takes little memory and time
_MOST = 1 << 28  # samples in the table of a cache
_TABLE_SHARE = 64  # a table of many samples takes at most one part in so many of the cache


class Wrapper:
    """Makes the parts of a `CachedDataset`, each from those before it: `cut`, then `make`.

    Args:
        dataset: of ``length`` samples.
        options, samples: the options of the cache.

    Attributes:
        probe: the samples that were loaded.
        split: how samples are made in two parts, or None; see NOTE [ Cut programs ].
        cache, disk: the cache in memory, and the one behind it, or None.
        loader: loads the samples that the caches miss.

    Raises:
        DatasetError, WorkerError, LimitError, SampleError: as `CachedDataset`, and as the caches; so do the methods.
    """

    cache: SharedCache | RaggedCache
    disk: DiskCache | None
    loader: SampleLoader | BlockLoader | Split

    def __init__(self, dataset: object, length: int, options: CacheOptions, samples: SampleOptions) -> None:
        if length > _MANY and length > min((limit := _limit_of(options)) // _TABLE_SHARE, _MOST):
            name = type(dataset).__name__
            logger.warning(
                "%s has %d samples. A cache of %s has no room for a table of so many, so %s makes each sample itself.",
                name, length, format_size(limit), name,
            )  # fmt: skip
            options, samples, length = CacheOptions(0), SampleOptions(copy=samples.copy), 0
        self._dataset, self._length, self._options, self._samples = dataset, length, options, samples
        ragged = options.admission != "all" or options.codec is not None
        if samples.variable is False and ragged:
            raise LimitError("admission='cost' and a codec are for samples of varying size. Leave variable=False out.")
        self._variable = True if ragged else samples.variable
        placement = samples.placement
        self._placement = placement if isinstance(placement, Placement) else Placement(placement)
        size = options.size_limit_gib
        self._caches = size == "auto" or parse_size(size) > 0 or options.disk is not None
        by_block = self._caches and options.admission == "all" and self._placement.unit == 1
        self._unit = admission_unit(dataset) if by_block else None
        probes = bool(samples.probe) and samples.example is None
        splits = bool(samples.split) and probes and self._unit is None
        self._stream = find_stream(dataset) if probes and self._caches else None
        self._splits = splits and self._caches and length > 0 and self._stream is None
        if not isinstance(samples.probe, int) or samples.probe < 0:
            raise LimitError(f"probe={samples.probe!r} is not a number of samples. Use 1 or more, or 0 for no probe.")
        if samples.store == "encoded" and not splits:
            raise LimitError("store='encoded' is for samples that are probed and split. Leave probe=, example= and split= out.")
        self._limit = 0
        if self._splits or options.narrow == "auto":
            promised = registry.run_attaching(siblings.promised_bytes) if size == "auto" else 0
            self._limit = _limit_of(options, promised)

    def make(self) -> None:
        """Make the cache, filled with the probed samples, and what belongs to it."""
        try:
            self.cache = self._make_cache()
        except MismatchError:  # another process may have made it at this moment, and cut elsewhere
            wanted = self._wanted()
            if self.split is None or wanted in (None, self.split.before_text()):
                raise
            self.cut(wanted)
            self.cache = self._make_cache()
        cache, options, samples = self.cache, self._options, self.probe.samples
        memory = cache if isinstance(cache, SharedCache) else None
        self.disk = DiskCache.behind(self._options_with_cut(), self._length, memory)
        if self.disk is not None and options.fingerprint is None:
            _warn_of_other_samples(self.disk, samples)
        if self._unit is None and not self.probe.keeps:
            for each in (cache, self.disk) if options.admission == "all" else (self.disk,):  # by cost, of timed samples
                if each is not None:
                    each.get_or_load_many(list(samples), partial(map, samples.__getitem__), strict=False)
        if self.split is not None:
            self.split.bind()
        if self._unit is None:
            self.loader = self.split or SampleLoader(self._dataset)
            return
        chosen = choose_blocks(self._dataset, cache, self.probe.named.values())
        nothing = bool((cache.aux_array == SlotState.OOB).all()) if chosen is None else not chosen.any()
        if cache.stats().capacity_bytes and nothing:
            logger.warning("size_limit_gib=%s is less than a block of the storage: nothing is cached.", options.size_limit_gib)
        self.loader = BlockLoader(self._dataset, cache, chosen, self.disk)

    def cut(self, wanted: str | None = None) -> None:
        """Load samples, and find how they are made in two parts, if they are.

        ``wanted``: the `Split.before_text` that is hoped for; if left out, the text of an earlier run.
        """
        wanted, options, planner = wanted or self._wanted(), self._samples, None
        self.split, self.probe = None, (probe := Probe())
        if self._splits:
            planner = Planner(self._dataset, self._length, self._limit, options, wanted)
        needs_survey = planner is not None and (options.store == "encoded" or planner.reads)
        if self._caches and not needs_survey:
            self.probe = probe = self._look(stops=planner is not None)
        if planner is None:
            return
        finds = probe.draws or needs_survey
        try:
            if not finds and probe.finding is None and (options.cut is not None or wanted or not self._fits()):
                finds = bool(probe.samples) and holds_pipelines(self._dataset)
            if finds:
                split, self.probe = planner.find(not probe.draws, self._look)
                self.split = split if split.has_rest else None
        except (CannotCut, SlowError) as error:
            if options.store == "encoded":
                raise DatasetError(ENCODED.format(type(self._dataset).__name__, str(error))) from None
            if needs_survey or probe.draws:
                probe.finding = f"{probe.finding}, {error}" if probe.draws else str(error)

    def _fits(self) -> bool:
        """Whether all samples fit, if they are like the probed ones."""
        expected = self._expected_bytes(self._options.narrow) if self._options.disk is None else None
        return expected is None or expected <= self._limit

    def _expected_bytes(self, narrow: object) -> int | None:
        """Return the bytes of all samples as records, if they are like the probed ones; None if that is not known."""
        options, rooms = self._options, list[int]()
        codec = None if options.codec is None else Codec(options.codec)
        encoder = RecordEncoder(options.allow_pickle, codec, bool(narrow))
        for sample in self.probe.samples.values():
            with contextlib.suppress(SampleError):
                rooms.append(encoder.pack(sample, "").room)
        return sum(rooms) * self._length // len(rooms) if rooms else None

    def _wanted(self) -> str | None:
        """Return where the samples of an earlier run were cut; None without an earlier run."""
        name, disk = self._options.name, self._options.disk
        found = None if name is None else identity_of(name)
        if found is None and disk is not None:
            found = manifest_of(disk)
        return None if found is None else str(found.get("fingerprint") or "").partition(FINGERPRINT_STEPS_SEPARATOR)[2]

    def _options_with_cut(self) -> CacheOptions:
        """Return the options, whose fingerprint says where samples are cut, if later runs or other jobs can see them."""
        options, before = self._options, "" if self.split is None else self.split.before_text()
        if not before or (options.name is None and options.disk is None):
            return options
        return dataclasses.replace(options, fingerprint=f"{options.fingerprint or ''}{FINGERPRINT_STEPS_SEPARATOR}{before}")

    def _make_cache(self) -> SharedCache | RaggedCache:
        options, probe = self._options_with_cut(), self.probe
        if probe.finding is not None or probe.keeps:  # samples are random, or each rank wants to load them
            options = dataclasses.replace(options, share_ranks=False)
        structure = _common_structure(probe, self._variable)
        if options.narrow == "auto":
            nbytes = self._expected_bytes(False) if structure is None else structure.nbytes * self._length
            options = dataclasses.replace(options, narrow=nbytes is None or nbytes > self._limit)
        if options.narrow and structure is not None:
            structure = _narrowed(structure, list(probe.named.values()))
        by_ranks = options.name is None and options.share_ranks
        proof = proof_of(self._dataset, probe, self.split) if by_ranks else None
        if structure is not None:
            placement = self._placement if self._unit is None else dataclasses.replace(self._placement, unit=self._unit)
            return SharedCache.from_options(options, self._length, structure, placement=placement, proof=proof)
        if self._placement == Placement("scattered") or probe.finding is not None:
            expected = self._expected_bytes(options.narrow)
            if options.narrow and expected and (wide := self._expected_bytes(False)):
                logger.info(
                    "numbers made of small integers are kept as these: %.3g times as many samples fit.", wide / expected
                )
            return RaggedCache.from_options(options, self._length, proof, expected)
        raise LimitError(
            f"placement={self._samples.placement!r} is for samples of one shape. Those of varying size are kept in the order "
            f"in which they come; leave it out."
        )

    def _look(self, split: Split | None = None, first: Sequence[int] = (), stops: bool = False) -> Probe:
        """Return the probed samples, or the example. See `probe_samples`."""
        count, example = self._samples.probe, self._samples.example
        if example is not None:
            return Probe(example=example)
        disk = self._options.disk if self._options.fingerprint is not None and split is None else None
        if disk is not None and count and not self._options.narrow:  # one sample does not say what all are made of
            known = known_example(disk, self._length, self._options.fingerprint)
            if known is not MISSING and not (known is None and self._samples.variable is False):
                return Probe(example=known)
        if self._stream is not None:
            name = type(self._dataset).__name__
            return Probe(
                finding=f"{name} holds {self._stream}, which returns each item once, so no sample is loaded before your loop. "
                f"If samples depend on their index alone, pass probe=0"
            )
        if count:
            return probe_samples(self._dataset, self._length, count, None if split is None else split.load, first, stops)
        if self._samples.variable is False:
            raise LimitError("variable=False needs to know what samples look like. Give example=sample, or leave probe=0 out.")
        return Probe()


def _limit_of(options: CacheOptions, promised: int = 0) -> int:
    """Return the bytes of the cache. ``promised``: to other caches."""
    size = options.size_limit_gib
    return recommended_limit(options.name is not None, promised) if size == "auto" else parse_size(size)


def check_dataset(dataset: Any) -> int:
    """Return the length of a map-style dataset.

    Raises:
        DatasetError: it is not one.
    """
    kind = type(dataset).__name__
    # Streams of LitData and MosaicML can be read by number, too
    own = static_attribute(type(dataset), "__getitem__")
    by_number = hasattr(dataset, "__len__") and own is not vars(Dataset)["__getitem__"]
    if (isinstance(dataset, IterableDataset) and not by_number) or own is None:
        raise DatasetError(
            f"{kind} has no samples by number, which a cache needs. Give a map-style dataset, with __len__ and __getitem__: "
            f"list({kind.lower()}) if it fits in memory; if it is of Hugging Face, load it with streaming=False. "
            f"CachedIterable records one that can only be iterated over."
        )
    try:
        length = check_len(len(dataset))
    except (TypeError, NotImplementedError) as error:
        raise DatasetError(f"{kind} has no length, which a cache needs: {error}. Define __len__.") from error
    if isinstance(dataset, Mapping):
        try:
            by_number = all(key in dataset for key in ({0, length - 1} if length else ()))
        except Exception:  # whatever its class raises for a number: a TensorDict
            raise DatasetError(
                f"{kind} is in memory already, and makes batches of its rows by itself. Use it without a cache, or give a "
                f"Dataset whose __getitem__ returns row idx of it."
            ) from None
        if not by_number:
            raise DatasetError(
                f"{kind} is a mapping with the keys {list(dataset)!r:.100}, not with the indices 0 to {length - 1}. Wrap one "
                f"of its values, CachedDataset({kind.lower()}[{next(iter(dataset))!r}]), or list({kind.lower()}.values())."
            )
    return length


def _warn_of_other_samples(disk: DiskCache, samples: Mapping[int, object]) -> None:
    """Warn if samples of the dataset are not the samples on the disk."""
    for idx, sample in samples.items():
        if not disk.agrees(idx, sample):
            logger.warning(
                "sample %d in %s is not the dataset's: it is of other data, or made with random numbers. The samples "
                "there are used. Pass fingerprint=…, which identifies the data, or remove them: stocache rm %s",
                idx, disk.disk, disk.disk,
            )  # fmt: skip
            return


def _narrowed(structure: Structure, samples: list[Any]) -> Structure:
    """Return the structure that stores the samples in fewer bytes, if they are made of small integers."""
    narrow = structure.narrowed(samples)
    changed = [leaf.kind for leaf in narrow.leaves if isinstance(leaf.kind, NarrowKind)]
    if changed:
        kinds = dict.fromkeys(f"{kind.wide.array_dtype} made of {kind.narrowing} kept as {kind.dtype}" for kind in changed)
        logger.info("%s: %.3g times as many samples fit.", ", ".join(kinds), structure.nbytes / max(1, narrow.nbytes))
    return narrow


def _common_structure(probe: Probe, variable: bool | None) -> Structure | None:
    """Return the structure of the samples when they all have the same, with the same dtypes and shapes; else None.

    Raises:
        SampleError: they differ, or cannot be cached so, and ``variable`` is False.
    """
    samples = probe.named
    if not samples:
        if probe.unfit is not None and variable is False:
            raise probe.unfit
        return None
    names = f"probed samples {list(probe.samples)}" if probe.samples else "the example"
    difference = "variable=True"
    if variable is not True:
        try:
            structure = Structure.of(next(iter(samples.values())), exact=True)
            for name, sample in samples.items():
                structure.encode(sample, name)
                if variable is None and Structure.of(sample).containers != structure.containers:
                    raise SampleError(f"{name} has its entries in another order.")
        except SampleError as error:
            if variable is False:
                raise
            difference = str(error)
        else:
            logger.info("%s: all are %s", names, structure)
            return structure
    logger.info("%s: kept as samples of varying size (%s)", names, difference)
    return None
