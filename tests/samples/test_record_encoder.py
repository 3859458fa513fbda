"""A RecordEncoder takes samples apart exactly as Record does, whatever structures it has seen before."""

import collections
import datetime
import pathlib

import numpy as np
import pytest
import torch

from stocache import SampleError
from stocache.samples import record_encoder
from stocache.samples.leaves import kind
from stocache.samples.record_encoder import EncodedSample, RecordEncoder, write_treedef
from tests.support.samples import PICKLED, Annotated, Extra, Kind, Slotted, Space, boxes


def generic(sample, allow_pickle=False):
    record = EncodedSample(sample, "sample", allow_pickle)
    return write_treedef(record.treedef), *record.pack()


def encoded(encoder, sample):
    text, leaves = encoder.encode(sample, "sample")
    return text, *leaves.pack()


def check(encoder, sample, allow_pickle=False):
    assert encoded(encoder, sample) == generic(sample, allow_pickle)


SHARED, IMAGE = torch.arange(6.0), torch.zeros(3, 4, dtype=torch.uint8)
GRID, MATRIX = SHARED.view(2, 3), np.arange(6).reshape(2, 3)
STRUCTURES = [
    {"image": IMAGE, "label": 1}, {"image": IMAGE, "label": True}, {"image": IMAGE.half(), "other": 1},
    {"label": 1, "image": IMAGE}, collections.OrderedDict(image=torch.zeros(3, 4), label=1),
    {1: "a"}, {True: "a"}, {1.0: "a"}, {"1": "a"}, {b"1": "a"}, {None: "a"}, {Space.RAS: "a"}, {"ras": "a"},
    {Kind.BOX: 1}, {(1, "a"): 1}, {(True, "a"): 1},
    (SHARED, 1), (SHARED, 1.0), (SHARED, 2**70), (SHARED, -(2**63)), (SHARED, 2**63), (SHARED, 1j), (SHARED, False),
    (SHARED, SHARED), [SHARED, SHARED], (SHARED,), [SHARED, SHARED[::2]], [[SHARED], [SHARED]], {"a": SHARED, "b": [SHARED]},
    (GRID, 1), (GRID.T, 1), (GRID[:, ::2], 1), (SHARED.bfloat16(), 1), (SHARED.int(), 1), (torch.tensor([1 + 2j]).conj(), 1),
    (torch.tensor(3), 1), (torch.zeros(0, 3), 1), (torch.zeros(3, 0), 1),
    (np.arange(6), 1), (MATRIX, 1), (np.asfortranarray(MATRIX), 1), (np.arange(6)[::2], 1), (np.array(5), 1),
    (np.array(["a", "bc"]), 1), (np.array([""]), 1), (np.array("2026", "M8[D]"), 1), (np.array([(1, 2.0)], "i2,f8"), 1),
    (np.arange(6, dtype=">i4"), 1), (np.arange(6, dtype="<i4"), 1), (np.float32(3), 1), (np.int64(3), 1), (np.str_(""), 1),
    (np.str_("a"), 1), (np.void(b"ab"), 1), (np.bool_(True), 1), (np.complex64(1j), 1),
    "text", "", b"data", b"", bytearray(b"data"), None, 3, 2**70, 1.5, True, 1j, range(3), pathlib.Path("a/b"), torch.float32,
    datetime.date(2026, 11, 22), datetime.datetime(2026, 11, 22), datetime.timedelta(1), Kind.MASK, Space.LPS,
    [], (), {}, [[]], [None, None], [{}, {}], [1, 2], [1, 2.0], [1, True], [1, 2**70], [2**70], [True], (1, 2), (1, 2.0), [1j],
    ["a", None], [None, None, "a"], ["a", "b"], ["a", 1, None], [None, "a", 1, 1], [SHARED, 1], [SHARED, SHARED.int(), SHARED],
    [{"a": 1}, {"b": 1}, {"a": 2}], [{"a": 1}, {"a": 2}], [(SHARED, "a"), (SHARED, 1), (SHARED, "b")], [["a"], [], [1]],
    ("a",) * 20, (1, "a") * 20, ["a", 1] * 20, {str(number): number for number in range(20)},
    [{"bbox": [1.0, 2.0], "id": 1, "polygons": [[1, 2.5], [2.5]]}, {"bbox": [3.0], "id": 2, "polygons": [[1, 2]]}],
    Extra(SHARED, {"a": 1}), Slotted("x"), boxes(), boxes(Annotated), SHARED.as_subclass(Annotated),
    torch.Size([2, 3]), torch.max(torch.eye(2), 0),
]  # fmt: skip


@pytest.mark.parametrize("allow_pickle", [False, True])
@pytest.mark.parametrize("wrap", [None, lambda x: (x, "x"), lambda x: {"a": {"b": x}}, lambda x: [x, 1.5]])
def test_samples_that_change_their_structure_are_encoded_as_records_are(wrap, allow_pickle):
    encoder = RecordEncoder(allow_pickle)
    for value in [*STRUCTURES, *STRUCTURES, *reversed(STRUCTURES)]:
        check(encoder, wrap(value) if wrap else value, allow_pickle)


def test_what_is_many_or_pickled_is_encoded_as_records_are(monkeypatch):
    for value, _ in PICKLED:
        encoder = RecordEncoder(allow_pickle=True)
        for sample in (("a", 1), ("a", value), ("a", value), [value, "a"], {"x": value}, ("a", 2)):
            got, wanted = encoded(encoder, sample), generic(sample, allow_pickle=True)
            assert got[0] == wanted[0]
            assert b"pickle" in got[0] or got == wanted
    monkeypatch.setattr(kind, "BARE_NODES", 50)  # see NOTE [ Items without bytes ]
    encoder = RecordEncoder(allow_pickle=False)
    for value in [[None] * 300, [{}] * 300, [[None, ""]] * 200, [None] * 200]:
        check(encoder, value)
    assert len(encoded(encoder, [None] * 300)[1]) == 300 - 50 - 1


@pytest.mark.parametrize(("first", "second"), [
    ({"image": torch.zeros(3, 4), "label": 1}, {"image": torch.ones(5, 6), "label": 2}),
    ((b"data", "text", 1), (b"more data", "more text", 2)),
    ([np.zeros(3), np.zeros(4)], [np.ones(5)] * 9),
    ([SHARED, 1], [SHARED.neg(), 2]),
    ([{"boxes": [(1.0, 2.0)], "kind": Kind.BOX, "name": None}], [{"boxes": [(3.0,)] * 2, "kind": Kind.MASK, "name": None}] * 3),
    (Extra(SHARED, {"a": 1}), Extra(SHARED.neg(), {"a": 2})),
    (boxes(), boxes()),
    ((SHARED.bfloat16(), GRID.T, np.float32(1), 1j), (-SHARED.bfloat16(), -GRID.T, np.float32(2), 2j)),
])  # fmt: skip
def test_a_second_sample_of_a_structure_is_not_walked_again(first, second, monkeypatch):
    encoder, wanted = RecordEncoder(allow_pickle=False), generic(second)
    check(encoder, first)
    monkeypatch.setattr(record_encoder, "EncodedSample", lambda *arguments: pytest.fail("walked again"))
    assert encoded(encoder, second) == wanted


@pytest.mark.parametrize(("good", "bad", "message"), [
    ((SHARED, 1), (torch.zeros(6, requires_grad=True), 1), "requires a gradient, the cache gives plain CPU tensors back"),
    ((SHARED, 1), (torch.zeros(6, device="meta"), 1), r"sample\[0\] is on meta"),
    ((SHARED, 1), (SHARED.to_sparse(), 1), "sparse_coo tensor"),
    ((np.zeros(2), 1), (np.array([object()]), 1), r"sample\[0\] is a ndarray, which has no bytes of its own"),
    ({"a": 1}, {np.str_("a"): 1}, "that is not a str, number, enum member or tuple of such"),
    ({"a": 1}, {"a": object()}, r'sample 5: sample\["a"\] is a object'),
    (["a", 1], ["a", 1, object()], r"sample\[2\] is a object"),
])  # fmt: skip
def test_what_is_refused_is_refused_after_a_good_sample(good, bad, message):
    encoder = RecordEncoder(allow_pickle=False)
    for _ in range(2):
        check(encoder, good)
        with pytest.raises(SampleError, match=message):
            encoder.encode(bad, "sample 5")
    check(encoder, good)


def test_the_structures_that_are_kept_have_a_limit(monkeypatch):
    monkeypatch.setattr(record_encoder, "_KEYS", 10)
    encoder = RecordEncoder(allow_pickle=False)
    for count in range(15):
        check(encoder, {str(count): count})
        check(encoder, ("a",) * count)
    assert [len(encoder._writers), max(map(len, encoder._writers.values()))] == [10, record_encoder._ALTERNATIVES]
