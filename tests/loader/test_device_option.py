"""The option ``device``, where it is wrong or has no device to name."""

import subprocess
import sys

import pytest
import torch

from stocache import DataLoader
from stocache.errors import LimitError
from stocache.loader.device.cuda import as_device


@pytest.mark.parametrize("device", ["nonsense", 3.5, "mps", "meta"])
def test_a_device_that_is_none_of_cuda_is_refused(device):
    with pytest.raises(ValueError, match=r"Leave the option out|Use 'cuda'"):
        DataLoader([1], device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_cuda_a_device_is_refused_with_what_is_missing():
    with pytest.raises(ValueError, match=r"built without CUDA|sees no GPU"):
        DataLoader([1], device="cuda")


def test_a_device_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert as_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match=r"cuda:2.*2 GPU"):
        as_device("cuda:2")


def test_the_cpu_is_no_device_of_its_own():
    for device in (None, "cpu", torch.device("cpu")):
        loader = DataLoader([1, 2], device=device)
        assert loader.device is None
        assert [batch.tolist() for batch in loader] == [[1], [2]]


@pytest.mark.parametrize("limit", [-1, "much", float("nan")])
def test_a_limit_that_is_none_is_refused(limit):
    with pytest.raises(LimitError, match="device_limit_gib"):
        DataLoader([1], device_limit_gib=limit)


@pytest.mark.slow
def test_nothing_of_a_gpu_is_imported_without_one():
    code = """
import sys
from torch.utils.data import TensorDataset
import torch, stocache
with stocache.CachedDataset(TensorDataset(torch.arange(8)), 1) as dataset:
    list(stocache.DataLoader(dataset, 2, num_workers=1))
assert not [name for name in sys.modules if name.startswith(("triton", "stocache.loader.device"))]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
