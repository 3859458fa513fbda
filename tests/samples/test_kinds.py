"""A kind of leaf is one class: records and blocks both write and read its values."""

import struct

import pytest
import torch

from stocache import RaggedCache, SampleError
from stocache.samples.kinds import BYTES, ENCODERS, KINDS, Kind
from stocache.storage.block import Block, BytesFile, encode


class Celsius:
    def __init__(self, degrees):
        self.degrees = degrees


class CelsiusKind(Kind):
    name, types, dims, itemsize, stored_as = "Celsius", (Celsius,), 0, 8, (torch.uint8, (8,))

    @classmethod
    def encode(cls, value):
        return (cls.name,), BYTES, struct.pack("<d", value.degrees), ()

    def reader(self, trusted):
        return lambda cursor: Celsius(*struct.unpack_from("<d", cursor.memory, cursor.take(BYTES, 8)))

    def maker(self, trusted):
        return lambda buffer, at, count, shape: Celsius(*struct.unpack_from("<d", buffer, at))


def test_a_new_kind_is_one_class(monkeypatch):
    sample = {"inside": [Celsius(21.5), Celsius(-3.0)], "outside": Celsius(0.5), "label": "a"}
    with RaggedCache("1MB", 1) as cache:
        with pytest.raises(SampleError, match=r'sample\["inside"\]\[0\] is a Celsius, which has no bytes of its own'):
            cache.set_slot(0, sample)
    monkeypatch.setitem(KINDS, CelsiusKind.name, CelsiusKind)
    monkeypatch.setitem(ENCODERS, Celsius, CelsiusKind.encode)
    with RaggedCache("1MB", 1) as cache:
        cache.set_slot(0, sample)
        from_record = cache.get_slot(0)
    (from_block,) = Block(BytesFile(b"".join(encode([sample])[0])), "a block").all()
    for got in (from_record, from_block):
        assert [value.degrees for value in (*got["inside"], got["outside"])] == [21.5, -3.0, 0.5]
        assert got["label"] == "a"


@pytest.mark.parametrize("missing", ["encode", "reader", "maker"])
def test_a_kind_without_a_layout_cannot_be_made(missing):
    half = type("Half", (CelsiusKind,), {missing: getattr(Kind, missing)})
    with pytest.raises(TypeError, match=f"abstract.*{missing}"):
        half()
