"""Programs with the shapes of published ones are cut where they can be, and every sample and random number stays the same."""

import copy

import pytest

from stocache import CachedDataset

pytest.importorskip("PIL.Image", reason="PIL is not installed")
from tests.support.epochs import LOADERS, difference_of, epochs, opened
from tests.support.shapes import SHAPES, N, outcome

pytestmark = [pytest.mark.filterwarnings(f"ignore:.*{text}") for text in ("no accelerator is found", "not writable")]

SOME = [  # of each kind of cut, beside loaders
    "paired super-resolution", "a crop is drawn, then files are read", "flip and affine of a drawn scale", "a random partner",
    "some samples return early", "a segment of a wave", "seeds that are drawn", "parts that share memory",
]  # fmt: skip
OTHERS = [name for name in LOADERS if name not in ("torch", "ours, threads")]  # which draw in no order
OWN = "flip and affine of a drawn scale"  # draws from a generator of its own, of which each thread has a copy
ROWS = [(name, OTHERS[(number + turn) % len(OTHERS)]) for number, name in enumerate(SOME) for turn in (0, 2)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "loader"), [*((name, "torch") for name in SHAPES), *(row for row in ROWS if row != (OWN, "ours, thread"))]
)
def test_samples_and_generators_are_those_without_a_cache_and_what_is_before_the_draw_runs_once(
    name, loader, tmp_path, monkeypatch
):
    monkeypatch.setattr("stocache.datasets.cut.planning._NEGLIGIBLE_S", 1.0)  # a busy machine measures more than there is
    monkeypatch.setattr("stocache.datasets.cut.surveying._WORTH", 0.0)  # or less
    shape = SHAPES[name]
    plain = shape.make(tmp_path)
    inner = copy.deepcopy(plain)
    with opened(tmp_path) as files:
        expected = epochs(plain, loader, inner=plain, files=files)
        with CachedDataset(inner, 0.1) as cached:
            found = epochs(cached, loader, inner=inner, files=files)
            assert difference_of(found, expected) is None
            assert outcome(cached) == shape.expected
    if shape.expected != "uncached" and loader == "torch":
        opens, audits = len(expected[0].files), 3 * -(-len(expected[0].files) // N)  # the files of a few samples
        assert max(len(epoch.files) for epoch in found[1:]) <= shape.again * N + audits, opens
