"""Allocate the memory of a cache: new memory, or the memory of processes with the same name, or of other ranks of this job.

NOTE [ Sharing between ranks ]
    A rank uses the cache that another rank has made if that has the same arguments and is for the same samples. The *proof*
    describes the samples: the class of the dataset, the steps before the cache, all values in the dataset, and a digest of each
    probed sample. All of it is compared when the cache is made, without a call to other ranks: a rank that comes late finds a
    warm cache, and one that never comes is not waited for. A fingerprint takes the place of the proof. So does an empty proof,
    with which a program declares that the samples are equal. Without any of these nothing says that the samples of two ranks
    are equal, and no other rank uses the cache.

    The header of a cache has little room. It holds a checksum of the values, and the beginning of their texts, so that the
    warning can name the first value that differs.

    Ranks that make different caches at one place of the program have a part of the limit each. The memory that one of them
    has reserved by then stays, so that all together never take more than the limit.
"""

import functools
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType

import numpy as np

from stocache.cache.options import CacheOptions
from stocache.cache.placement import Placement, residency
from stocache.cache.slots import column_offsets
from stocache.cache.stats import OOB
from stocache.errors import BusyError, CacheNameError, LimitError, SegmentError
from stocache.samples.spec import Structure
from stocache.shm import claims, named, registry, siblings
from stocache.shm.job import ANYWHERE, Job, job_here
from stocache.shm.layout import Layout
from stocache.shm.named import Descriptor, Identity, NewSegment
from stocache.shm.registry import ForeignError
from stocache.shm.segment import Segment
from stocache.shm.siblings import Sibling
from stocache.system import limits
from stocache.system.hashing import checksum
from stocache.system.limits import format_size, parse_size, recommended_limit
from stocache.system.platform import here

logger = logging.getLogger("stocache")

_CHUNK = 1 << 16  # samples marked at a time: half a MiB of indices
_DIGESTS = re.compile(r" '[0-9a-f]{16,}', now '[0-9a-f]{16,}'")  # which tell a reader nothing
_PARTS, _SHOWN, _LONGEST = 3, 400, 24  # texts of values in a header, their length, and the length of one value's text
_SLOT_EXTENT = 1 << 16  # bytes: the first batch, of slots at random, reserves an extent for each sample


@dataclass(frozen=True)
class CacheLayout:
    """The memory of a cache for any capacity. The capacity counts slots; or bytes, if samples vary in size.

    Attributes:
        control_bytes: bytes of the cache's state, which begins with one state byte per sample of the dataset. The limit of the
            cache counts them. It does not count the words of claims, 4 bytes per sample, which follow them.
        identity: must be equal, like the number of samples, before another process may attach to a cache of the same name.
        structure: the structure of each sample; None if samples vary in size.
        placement: which samples get the slots; None if samples vary in size.
        expected_bytes: the estimated bytes of all samples, if they vary in size. "auto" then takes twice that at most, or half
            of the memory that the machine can spare if that is more.
    """

    dataset_len: int
    control_bytes: int
    identity: Identity
    structure: Structure | None = None
    placement: Placement | None = None
    expected_bytes: int | None = None

    @property
    def all_control_bytes(self) -> int:
        """The control bytes, with the words of claims."""
        return claims.with_words(self.control_bytes, self.dataset_len)

    @property
    def extent_bytes(self) -> int | None:
        """The size of an extent, for `Layout.for_sizes`."""
        return None if self.structure is None else _SLOT_EXTENT

    @property
    def unit(self) -> str:
        """The quantity that the capacity counts: "slots" or "bytes"."""
        return "bytes" if self.structure is None else "slots"

    def capacity_within(self, limit: int) -> int:
        """Return the capacity that fits into ``limit`` bytes, together with the control bytes."""
        left = limit - self.control_bytes
        if self.structure is None:
            return max(0, left)
        if self.structure.nbytes == 0:
            return self.dataset_len if left >= 0 else 0
        return max(0, min(self.dataset_len, left // self.structure.nbytes))

    def capacity_of(self, size_limit_gib: float | str) -> int:
        """Return the capacity that a limit, except "auto", stands for, whatever the machine can give.

        Raises:
            LimitError: the limit is not a size; or it is not 0, and leaves no room for one slot.
        """
        limit = parse_size(size_limit_gib)
        capacity = self.capacity_within(limit)
        if limit and self.dataset_len and not capacity:
            needed = "" if self.structure is None else f"; one slot needs {self.structure.nbytes} bytes"
            raise LimitError(
                f"cache holds 0 {self.unit}: size_limit_gib={size_limit_gib} leaves {max(0, limit - self.control_bytes)} bytes "
                f"after the {self.control_bytes}-byte state array{needed}. Raise size_limit_gib, or pass 0 for no cache."
            )
        return capacity

    def affordable(self, size_limit_gib: float | str, named: bool, most: int | None = None) -> int:
        """Return the capacity that a limit stands for; if the machine has less memory, the capacity of that, with a warning.

        ``most``: the bytes that this cache may have of a limit that it shares with others.

        Raises:
            LimitError: as `capacity_of`.
        """
        if size_limit_gib == "auto":
            limit = limits.recommended_limit(named, siblings.promised_bytes())
            if self.expected_bytes is not None:
                limit = min(limit, max(limit // 2, 2 * self.expected_bytes + self.control_bytes))
        else:
            limit = parse_size(size_limit_gib)
            self.capacity_of(size_limit_gib)  # or an error
        capacity = self.capacity_within(limit if most is None else min(limit, most))
        if (limit or size_limit_gib == "auto") and self.dataset_len and not capacity:
            needed = "" if self.structure is None else f" of {format_size(self.structure.nbytes)}"
            logger.warning("size_limit_gib=%r leaves no room for one sample%s. Nothing is cached.", size_limit_gib, needed)
        fitting = min(capacity, self.capacity_within(limits.shared_memory_room(named)))
        if fitting < capacity:
            caching = format_size(fitting) if self.structure is None else f"{fitting} of {self.dataset_len} samples"
            limits.warn_short(limit, caching, named)
        return fitting

    def data_bytes(self, capacity: int) -> int:
        """Return the bytes of data for a capacity."""
        return capacity if self.structure is None else column_offsets(self.structure, capacity)[-1]

    def segment_layout(self, capacity: int, identity: Identity) -> Layout:
        """Return the layout of a named segment for a capacity, with the descriptor that other processes read."""
        facts = {"dataset_len": self.dataset_len, "capacity": capacity}
        if self.structure is not None:
            facts["slot_bytes"] = self.structure.nbytes
        descriptor = Descriptor({self.unit: capacity} | dict(identity), facts)
        return Layout.for_sizes(self.all_control_bytes, self.data_bytes(capacity), descriptor.pack(), self.extent_bytes)

    def fits(self, layout: Layout, descriptor: Descriptor) -> bool:
        """Return whether a segment has the sizes that belong to its capacity."""
        data_bytes = self.data_bytes(int(descriptor.facts["capacity"]))
        return (layout.control_bytes, layout.data_bytes) == (self.all_control_bytes, data_bytes)

    def mark_outsiders(self, control: memoryview, capacity: int) -> None:
        """Set the state bytes of all samples that have no slot to OOB. Before, all of ``control`` is zero."""
        if self.placement is not None and capacity < self.dataset_len:
            chosen = residency(self.placement, self.dataset_len, capacity)
            states = np.frombuffer(control, np.uint8, self.dataset_len)
            for start in range(0, self.dataset_len, _CHUNK):  # by numpy: torch's threads take 20 times as long for so few
                indices = np.arange(start, min(start + _CHUNK, self.dataset_len))
                states[start : start + _CHUNK][~chosen.resident(indices)] = OOB


def open_own(layout: CacheLayout, capacity: int, identity: Identity | None = None) -> tuple[Segment, int]:
    """Return a new segment without a name, and its capacity: 0 if the machine has no shared memory."""
    descriptor = layout.segment_layout(capacity, identity or {}).descriptor
    data_bytes = layout.data_bytes(capacity)
    segment = Segment.create(layout.all_control_bytes, data_bytes, layout.extent_bytes, descriptor, for_threads=True)
    if segment.backing == "none":
        capacity = 0
    layout.mark_outsiders(segment.control, capacity)
    return segment, capacity


_made: Counter[str] = Counter()  # by place of the program: how many caches this process has made there


@dataclass(frozen=True)
class Proof:
    """A description of the samples of a cache, to compare it between ranks.

    Attributes:
        facts: texts that must be equal, by their subject.
        samples: digests of some samples, by index. Digests that both ranks know must be equal, and there must be one. If there
            are no samples, the place of the program must be the same.
        values: names and texts of the values that samples may depend on. All must be equal. The text of a value that has parts
            begins with "a".
    """

    facts: Mapping[str, str] = field(default_factory=dict)
    samples: Mapping[int, str] = field(default_factory=dict)
    values: Sequence[tuple[str, str]] = ()

    @property
    def identity(self) -> Identity:
        """The proof as a part of an identity."""
        probed = " ".join(f"{idx}:{digest}" for idx, digest in self.samples.items())
        shown = "".join(f"{_shown(*value)}\n" for value in self._leaves)
        values = {f"values {number}": shown[number * _SHOWN :][:_SHOWN] for number in range(_PARTS)}
        values["values"] = checksum(repr(self.values).encode())
        return {**self.facts, **values, "probed": probed} if probed else self.facts

    @property
    def _leaves(self) -> list[tuple[str, str]]:
        """The values without parts."""
        return [(name, text) for name, text in self.values if not text.startswith("a ")]

    def other_value(self, held: Identity) -> str:
        """Return how a value differs from the value of a different rank, whose identity is ``held``; "" if none does."""
        if held.get("values") == self.identity.get("values"):
            return ""
        *theirs, _ = "".join(str(held.get(f"values {number}", "")) for number in range(_PARTS)).split("\n")
        for (name, text), other in zip(self._leaves, theirs, strict=False):
            mine = _shown(name, text)
            if text.startswith(NOT_COMPARABLE):
                return f"{name} cannot be compared"
            if mine[:2] != other[:2]:
                return f"only one of two ranks has {name}"
            if mine != other:
                return f"{name} differs" if mine[2] == "#" or other[2] == "#" else f"{name}: {mine[2:]} here, {other[2:]} there"
        return "a value in the dataset differs"


NOT_COMPARABLE = "not comparable"
"""Begins the text of a value that cannot be compared. The rest is different in each process."""


def _shown(name: str, text: str) -> str:
    """Return what the header of a cache holds of a value: a mark of its name, and its text if that is short and no checksum."""
    is_short = len(text) <= _LONGEST and not text.startswith(("#", NOT_COMPARABLE))
    return checksum(name.encode(errors="replace"))[:2] + (text if is_short else f"#{checksum(text.encode())[:4]}")


def open_memory(
    layout: CacheLayout, options: CacheOptions, proof: Proof | None = None, job: Job | None = None
) -> tuple[Segment, int]:
    """Return the segment of a cache, and its capacity. It may be one that exists: of that name, or of another rank of this job.

    ``job``: the processes that share a cache without a name, if they are others than the ranks of this job.

    If the machine has no shared memory, the backing of the segment is "none", and the capacity 0.

    Raises:
        LimitError: the limit leaves no room for one slot.
        CacheNameError: the name is not valid.
        SegmentError: the file of that name is not a segment of this user, or is damaged.
        MismatchError: the name is in use for other data.
        BusyError: another process holds the lock of the named caches, and ``on_busy`` is "raise".
    """
    if not here.SHARES_MEMORY:
        if options.name is not None:
            raise CacheNameError(
                f"name={options.name!r}: caches with a name are shared between processes, which works on Linux only. Leave the "
                f"name out, and use worker_method='thread'. For later runs: disk=, disk_limit=, fingerprint=."
            )
        return open_own(layout, layout.affordable(options.size_limit_gib, False))
    if options.name is None:
        return _Opener(layout, options, proof, job or job_here()).open()
    return _Opener(layout, options, None, job_here()).open_named(options.name)


class _Opener:
    """Opens a cache: by its name, with other ranks, or a new one. Its methods return the segment and the capacity."""

    def __init__(self, layout: CacheLayout, options: CacheOptions, proof: Proof | None, job: Job) -> None:
        self._layout, self._options, self._job, self._size = layout, options, job, options.size_limit_gib
        self._proof, self._shares = proof, proof is not None or options.fingerprint is not None
        site = "" if job.key.startswith(ANYWHERE) else _place()
        self._identity: dict[str, str | int | None] = {
            "job": job.key if self._shares else f"{job.key}, each rank alone",
            "place": f"{site} ({_made[site]})" if site else "",
            "dataset_len": layout.dataset_len,
            **layout.identity,
            "size_limit_gib": str(self._size),
            "fingerprint": options.fingerprint,
            **({} if proof is None else proof.identity),
        }
        _made[site] += 1

    def open(self) -> tuple[Segment, int]:
        if self._job.alone:
            _warn_of_containers(self._job.ranks)
        if self._job.alone or not self._options.share_ranks:
            return self._open_part()
        if not self._job.launched:
            return registry.run_attaching(lambda: self._create(None))
        try:
            agrees = self._agrees if self._shares else None
            segment, descriptor = siblings.join(str(self._identity["job"]), agrees, self._new)
        except OSError as error:
            if isinstance(error, BusyError) and self._options.on_busy == "raise":
                raise
            return self._open_part(error)
        return segment, self._capacity if descriptor is None else int(descriptor.facts["capacity"])

    def open_named(self, name: str) -> tuple[Segment, int]:
        """Return the segment of a name, which may be one that exists. If it cannot be had, see `_open_part`."""
        layout, options, size = self._layout, self._options, self._size
        identity = {"dataset_len": layout.dataset_len, **layout.identity, "fingerprint": options.fingerprint}
        if size != "auto":  # which differs from rank to rank: they look at different moments
            identity[layout.unit] = layout.capacity_of(size)

        def new() -> NewSegment | None:
            capacity = layout.affordable(size, True)
            if capacity == 0:
                return None
            return layout.segment_layout(capacity, identity), partial(layout.mark_outsiders, capacity=capacity)

        found = None
        try:
            found = named.join(name, identity, options.persist, new)
        except BusyError as error:
            if options.on_busy == "raise":
                raise
            logger.warning("cache %r holds nothing: %s", name, str(error))
        except OSError as error:
            if isinstance(error, SegmentError) and not isinstance(error, ForeignError):
                raise
            return self._open_part(error)
        if found is None:  # a cache of its own instead would take the limit, which is for the machine, in each process
            return open_own(layout, 0)
        segment, descriptor = found
        capacity = int(descriptor.facts["capacity"])
        if not layout.fits(segment.layout, descriptor):
            raise SegmentError(f"{segment.path} is damaged: its sizes do not belong to a capacity of {capacity}.")
        return segment, capacity

    def _open_part(self, problem: OSError | None = None) -> tuple[Segment, int]:
        """Return a segment for this rank alone, with its part of the limit."""
        if problem is not None:
            name = "The cache" if self._options.name is None else f"Cache {self._options.name!r}"
            logger.warning("%s is not shared: this process has its own part of the limit. %s", name, problem)
        self._identity["job"] = ""
        return registry.run_attaching(lambda: self._create(self._total() // self._job.ranks))

    def _create(self, most: int | None) -> tuple[Segment, int]:
        capacity = self._layout.affordable(self._size, False, most)
        return open_own(self._layout, capacity, self._identity)

    def _new(self, found: list[Sibling]) -> Segment:
        rivals = [sibling for sibling in found if sibling.descriptor.identity.get("place") == self._identity["place"]]
        most = self._divide(rivals) if rivals or not self._shares else None
        segment, self._capacity = self._create(most)
        return segment

    def _divide(self, rivals: list[Sibling]) -> int:
        """Give each of the caches that were made at this place its part of the limit. Return the part of a new one."""
        total = self._total()
        if self._size == "auto":
            total += sum(sibling.layout.data_bytes for sibling in rivals)
        part = total // max(self._job.ranks, len(rivals) + 1)
        left = total - sum(siblings.limit_growth(sibling, part) for sibling in rivals)
        if self._shares:
            logger.warning(
                "the ranks of this job cannot share a cache in %s: %s. So this rank has a cache of its own, and each has its "
                "part of size_limit_gib. If that is meant, pass share_ranks=False; if their samples are equal, pass name=.",
                self._identity["place"], self._why(rivals[0].descriptor),
            )  # fmt: skip
        return max(0, min(part, left))

    def _total(self) -> int:
        """Return the bytes that all ranks may have together."""
        return recommended_limit(False, siblings.promised_bytes()) if self._size == "auto" else parse_size(self._size)

    def _agrees(self, sibling: Sibling) -> bool:
        return not self._why(sibling.descriptor) and self._layout.fits(sibling.layout, sibling.descriptor)

    def _why(self, descriptor: Descriptor) -> str:
        """Return where a cache of another rank differs; "" if it can be shared."""
        wanted = dict(self._identity)
        probed, held = wanted.pop("probed", None), descriptor.identity
        if probed is not None:
            del wanted["place"]  # the samples identify the caches
        if held.keys() - {"place", "probed", self._layout.unit} != wanted.keys() - {"place"}:
            return "it is of another kind"
        difference = descriptor.differences({key: value for key, value in wanted.items() if not key.startswith("values")})
        if difference or probed is None or self._proof is None:
            return _DIGESTS.sub(" differ", difference)
        return self._proof.other_value(held) or _other_samples(held.get("probed"), probed)


def _other_samples(held: object, probed: object) -> str:
    theirs, ours = (dict(each.split(":") for each in str(text or "").split()) for text in (held, probed))
    common = theirs.keys() & ours.keys()
    other = [idx for idx in common if theirs[idx] != ours[idx]]
    if other:
        return f"sample {min(map(int, other))} differs"
    return "" if common else "no sample of both is known"


def _place() -> str:
    """Return the place of the program that makes a cache: the first one outside this package."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and (frame.f_globals.get("__name__") or "").partition(".")[0] == __package__.partition(".")[0]:
        frame = frame.f_back
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


@functools.cache
def _warn_of_containers(ranks: int) -> None:
    logger.warning(
        "the other ranks of this machine run in containers of their own, and cannot share a cache without a name: each of %d "
        "has its part of the limit. Start the containers with --ipc=host, and pass name=.", ranks,
    )  # fmt: skip
