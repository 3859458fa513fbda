"""The samples of a source that a prepared folder lacks, because they cannot be loaded: skipped.json.

NOTE [ Skipped samples ]
    All blocks but the last have one size. So samples that cannot be loaded leave no gaps: the samples from the end of the order
    take their places. All others stay where they are.

    Which samples cannot be loaded is known only at the end. So a preparation first goes through the whole source. It writes the
    blocks that can be loaded, and notes here which samples failed. Then the order changes: the blocks that have other samples
    now are removed, this file says that the samples are left out, and the missing blocks are written. If another sample fails
    then, the same happens once more. So at any instant the blocks in the folder are the blocks of the order without the samples
    that are left out. A preparation that was killed goes on from there.

    skipped.json is one JSON object:

        checksum      16 hexadecimal digits: the XXH3-64 of the file with zeros in place of these digits
        format        "stocache skipped samples"
        version       1
        skipped       index in the source, name and reason of each sample that is left out of the blocks
        failed        until the folder is prepared: the same of the samples that failed since
"""

import json
from dataclasses import asdict, dataclass, field

from stocache.errors import DamagedError
from stocache.samples.leaves.type_lookup import check_size
from stocache.storage.local import Folder
from stocache.system.hashing import ZEROS, embed_checksum, read_checksum

SKIPPED = "skipped.json"
_FORMAT, _VERSION = "stocache skipped samples", 1
_MARK = b'"checksum": "'
_GROWTH = 1.1  # by how much the notes grow before they are saved again: so all of them are written a few times only


@dataclass(frozen=True)
class SkippedSample:
    """A sample that cannot be loaded: its index in the source, its name or path if the source has one, and the reason."""

    index: int
    name: str | None
    reason: str


@dataclass
class SkippedSamples:
    """The content of skipped.json in a folder, by index; see NOTE [ Skipped samples ].

    Attributes:
        folder: the folder.
        left_out: samples that the order of the blocks does not have.
        failed: samples that could not be loaded either.
    """

    folder: Folder
    left_out: dict[int, SkippedSample] = field(default_factory=dict)
    failed: dict[int, SkippedSample] = field(default_factory=dict)
    _saved: int = 0

    @property
    def known(self) -> dict[int, SkippedSample]:
        """All samples that cannot be loaded."""
        return self.left_out | self.failed

    def note(self, failures: list[SkippedSample]) -> None:
        """Add samples that failed. The last ones are in the file only after `leave_out`."""
        self.failed |= {sample.index: sample for sample in failures}
        if len(self.left_out) + len(self.failed) > _GROWTH * self._saved:
            self._save()

    def leave_out(self, samples: dict[int, SkippedSample]) -> None:
        """Save that exactly these samples are left out, and that no other has failed."""
        self.left_out, self.failed = samples, {}
        self._save()

    def _save(self) -> None:
        if not self.known:
            self.folder.remove(SKIPPED)
            return
        facts = {"checksum": ZEROS, "format": _FORMAT, "version": _VERSION, "skipped": _records(self.left_out)}
        if self.failed:
            facts["failed"] = _records(self.failed)
        self.folder.write(SKIPPED, embed_checksum(json.dumps(facts, indent=1).encode(), _MARK))
        self._saved = len(self.known)


def _records(samples: dict[int, SkippedSample]) -> list[dict[str, object]]:
    return [asdict(samples[index]) for index in sorted(samples)]


def read_skipped(folder: Folder) -> SkippedSamples:
    """Return the content of skipped.json in a folder; without samples if it does not exist.

    Raises:
        DamagedError: the file has changed since it was written.
    """
    try:
        text = folder.read(SKIPPED)
    except FileNotFoundError:
        return SkippedSamples(folder)
    try:
        facts = json.loads(text)
        if (facts["format"], facts["version"]) != (_FORMAT, _VERSION):
            raise ValueError(f"not version {_VERSION} of a list of skipped samples")
        read_checksum(text, _MARK)
        left_out, failed = (
            {check_size(record["index"]): SkippedSample(**record) for record in facts.get(name, ())}
            for name in ("skipped", "failed")
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(folder.path, f"damaged ({error})") from error
    return SkippedSamples(folder, left_out, failed)


def damaged(path: str, how: str) -> DamagedError:
    """Return the error of a folder whose skipped.json is missing or damaged."""
    return DamagedError(
        f"{path}/{SKIPPED} is {how}. Without it, the folder can be read, but a preparation not continued. Prepare it again "
        f"(again=True, --again), or start again if it is not prepared (resume=False, --no-resume)."
    )
