"""Former names of modules: pickles and imports that name them find the module that has moved, once."""

import importlib
import importlib.util
import pickle
import sys

import pytest

import stocache
from tests.support.processes import run_python


def test_a_pickle_that_names_a_former_module_is_read():
    sampler = stocache.BlockSampler(range(12), 4, True, window=2, seed=3)
    pickled = pickle.dumps(sampler, 2).replace(b"cstocache.loader.samplers.", b"cstocache.samplers.")
    assert b"cstocache.samplers." in pickled
    assert list(pickle.loads(pickled)) == list(sampler)


FORMER = {
    "stocache.samplers.block": "BlockSampler", "stocache.datasets.stored": "StorageDataset",
    "stocache.disk.cache": "DiskCache", "stocache.preparation.prepare": "prepare",
}  # fmt: skip


@pytest.mark.parametrize("former", FORMER)
def test_a_former_module_is_the_module_itself(former):
    module = importlib.import_module(former)
    assert getattr(module, FORMER[former]) is getattr(stocache, FORMER[former])
    assert module is sys.modules[module.__name__]
    assert module.__name__ == module.__spec__.name != former


def test_a_question_for_a_module_imports_nothing_and_what_never_was_is_not_found():
    find = "importlib.util.find_spec('stocache.datamodule')"
    code = f"import importlib.util, sys, stocache; print({find}.name, 'torch' in sys.modules)"
    assert run_python("-c", code).stdout.split() == ["stocache.datamodule", "False"]
    for name in ("stocache.nothing", "stocache.samplersx", "stocache.samplers.nothing"):
        with pytest.raises(ModuleNotFoundError, match=name.replace("samplers.", "loader.samplers.")):
            importlib.import_module(name)
