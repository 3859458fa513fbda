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
@pytest.mark.parametrize("ending", ["svg", "png"])
def test_a_file_has_the_epochs_the_waits_and_the_hit_rates(ending, loader, cached, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra bench")
    for source, panels in ((loader, 3), (loader.stats(), 3), (cached, 2), (cached.stats(), 2)):
        stocache.plot(source, tmp_path / f"{panels}.{ending}")
    sizes = [(tmp_path / f"{panels}.{ending}").read_bytes() for panels in (2, 3)]
    if ending == "svg":
        assert [b"wait for a batch" in text for text in sizes] == [False, True]
        assert all(b"samples from the cache" in text for text in sizes)


def test_elsewhere_a_table_is_printed(loader, cached, capsys):
    stocache.plot(loader)
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert [row[1].strip() for row in rows] == ["1", "2", "3"]
    assert [row[6].strip() for row in rows][1:] == ["100.0%", "100.0%"]
    assert all(row[4].strip().endswith("%") for row in rows)
    stocache.plot(cached)
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert [row[4].strip() for row in rows] == [""] * len(rows)  # how long a loop has waited, only its loader knows


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


@pytest.mark.parametrize("source", [3, "epochs", TorchLoader([1])], ids=lambda source: type(source).__name__)
def test_what_has_no_epochs_is_refused(source):
    with pytest.raises(TypeError, match=r"takes a stocache\.DataLoader, a CachedDataset"):
        stocache.plot(source)


def test_before_the_first_epoch_there_is_nothing_to_draw(cached):
    with pytest.raises(ValueError, match="there is no epoch to draw: iterate over the loader first"):
        stocache.plot(DataLoader(cached))


def test_an_unknown_format_is_refused(loader, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra bench")
    with pytest.raises(ValueError, match="Format 'chart' is not supported"):
        stocache.plot(loader, tmp_path / "epochs.chart")
