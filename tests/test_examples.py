"""The examples in the docstrings of the public names run, print what they show, and leave nothing behind."""

import doctest

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import stocache

PUBLIC = {name: getattr(stocache, name) for name in stocache.__all__}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MARKS = {"plot": pytest.mark.leaves_descriptors, "share": pytest.mark.linux}  # matplotlib keeps its fonts open
TEXT = "CsvFormat", "CustomFormat", "FixedWidthFormat", "JsonLinesFormat", "ReadOptions", "StreamLoader"
NEEDS = {"plot": "matplotlib"} | dict.fromkeys(TEXT, "pyarrow")


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in PUBLIC])
def test_the_example_of_a_name_gives_what_it_shows(name, tmp_path, monkeypatch):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason="comes with an extra")
    monkeypatch.chdir(tmp_path)
    around = {"torch": torch, "np": np, "TensorDataset": TensorDataset, "Dataset": Dataset, "__name__": "__main__"}
    found = doctest.DocTestParser().get_doctest(PUBLIC[name].__doc__, PUBLIC | around, name, None, 0)
    assert found.examples
    report = []
    failed, _ = doctest.DocTestRunner(optionflags=FLAGS).run(found, out=report.append)
    assert not failed, "".join(report)
