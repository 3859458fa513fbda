"""`plot` draws epochs into a file, shows them in a notebook, and prints them elsewhere."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

import stocache
from stocache import CachedDataset, DataLoader


@pytest.fixture
def cached():
    with CachedDataset(torch.utils.data.TensorDataset(torch.arange(20)), size_limit_gib=0.01) as dataset:
        yield dataset


@pytest.fixture
def loader(cached):
    loader = DataLoader(cached, batch_size=5)
    for _ in range(3):
        list(loader)
    return loader


@pytest.mark.leaves_descriptors
def test_a_file_has_the_epochs_the_waits_and_the_hit_rates(loader, cached, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra bench")
    for source, has_waits in ((loader, True), (cached.stats(), False)):
        stocache.plot(source, tmp_path / "epochs.svg")
        text = (tmp_path / "epochs.svg").read_text()
        assert ("wait for a batch" in text, "samples from the cache" in text) == (has_waits, True)


def test_elsewhere_a_table_is_printed(loader, cached, capsys):
    tables = []
    for source in (loader.stats(), cached):
        stocache.plot(source)
        lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
        tables.append([[cell.strip() for cell in line] for line in lines])
    assert [(row[1], row[6]) for row in tables[0]][1:] == [("2", "100.0%"), ("3", "100.0%")]
    assert all(row[4].endswith("%") for row in tables[0])
    assert {row[4] for row in tables[1]} == {""}  # how long a loop has waited, only its loader knows


@pytest.mark.leaves_descriptors
def test_a_notebook_shows_the_picture(loader, monkeypatch):
    pytest.importorskip("matplotlib", reason="needs the extra bench")
    shown = []
    for name, module in {
        "IPython": SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=None), version_info=(9, 0)),
        "IPython.display": SimpleNamespace(display=shown.append, Image=bytes),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    stocache.plot(loader)
    assert [each[:4] for each in shown] == [b"\x89PNG"]


def test_what_has_no_epochs_is_refused(cached):
    for source in (3, "epochs", TorchLoader([1])):
        with pytest.raises(TypeError, match=r"takes a stocache\.DataLoader, a CachedDataset"):
            stocache.plot(source)
    with pytest.raises(ValueError, match="there is no epoch to draw: iterate over the loader first"):
        stocache.plot(DataLoader(cached))
