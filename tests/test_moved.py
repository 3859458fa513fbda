"""Former names of modules: pickles and imports that name them find the module that has moved, once."""

import base64
import importlib
import importlib.util
import pickle
import sys
import zlib

import pytest

import stocache
from stocache import moved
from stocache.loader.samplers import block
from tests.support.processes import run_python

PICKLES = {  # made when samplers lay in stocache.samplers; and the order that they played
    "BlockSampler": (
        "c-lpe!A`?442D~_vcYymyu!HjA$F~_13ZA0Chl4-Bvss~5)u;JK=KXqzN9SzUu;?azF&S@f8XWVTzpT1*Gjiol6vkf1}bao^+kApochzUl`naCmsdG(fx"
        "XwQR5=%5yhEun-a?4Zb?z)D-oVV0v>ESUc04L~#(%>#(4fLFfdx?ak`!y+Eb%1OJ{>e&pyfdO=+d-`b+XOoKV%Ek#-_0-A1QV0objVnSCbUcBqmKkxy$6"
        ")!RUiEziiI8V1n<#suc6dH_!)ca7cfhVqN|KD5Yx}",
        [5, 4, 3, 0, 2, 6, 1, 7, 11, 9, 10, 8],
    ),
    "LocalityDistributedSampler": (
        "c-nPRO>fjN5KXp8vm1KgRG~`T%Yg`SLWo;A5fl*ofXH#YjaA2v{DHJcNN^~0rMWTu4gMmGlWpmRIXDyhdFH)0{+j*zy-MbQGv^Iwd=Qmm<D`Ujm7)zL{S"
        "M*m?IC?Fowu?JUi2Rq82-d3-|!2bLoO!62dopw+umpqvvq5O)>2<$14Yj~bHXF6yC9X9+9BkY=}SRH>ZC5~^ap-GIMHEjt(cVL%wfHPj6hddr?Ba*nOeo"
        "1$2~lVu!St4awxs=Otnsarq(4CZV2105_kid6QYlF%63wWi&1D|@#s$Rvfew|yuZu;$uqVmxv+7Zc`qzgge++3Be6`Ieiod^gy^K9gR*0u4+lak*tBznX"
        "vS~~>vy+5w;hJZvCuXs73m*$WdD_$(=FrPSgZ^3Q|eDN8!C7N$L++dClgP}iD_50+*nbKfvjcLGMd{7*~pEinFSuD5WR>*D0II-qVd;wk#-oZKd;kzb&W"
        "#>dGB{qoC~bv3*6r<r$>;!!lr57{GphaI`P=;FCHd`C=XwxZPH+Z?i~(Khi9?P@ce$0m;bp&&J{G{oe7>^4ZR@Y!bon<{hIF>y6P_rZ3e0",
        [1, 7, 3, 8, 2],
    ),
}


@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_that_names_a_former_module_is_read(name):
    pickled, order = PICKLES[name]
    restored = pickle.loads(zlib.decompress(base64.b85decode(pickled)))
    assert type(restored) is getattr(stocache, name)
    assert [int(idx) for idx in restored] == order


@pytest.mark.parametrize(
    ("former", "name"),
    [
        ("stocache.samplers.block", "BlockSampler"),
        ("stocache.datasets.stored", "StorageDataset"),
        ("stocache.disk.cache", "DiskCache"),
        ("stocache.preparation.prepare", "prepare"),
    ],
)
def test_a_former_module_is_the_module_itself(former, name):
    module = importlib.import_module(former)
    assert getattr(module, name) is getattr(stocache, name)
    assert module is sys.modules[module.__name__]
    assert module.__name__ != former
    assert module.__spec__.name == module.__name__


def test_a_question_for_a_module_imports_nothing_and_what_never_was_is_not_found():
    find = "importlib.util.find_spec('stocache.datamodule')"
    code = f"import importlib.util, sys, stocache; print({find}.name, 'torch' in sys.modules)"
    assert run_python("-c", code).stdout.split() == ["stocache.datamodule", "False"]
    for name in ("stocache.nothing", "stocache.samplersx", "stocache.samplers.nothing"):
        with pytest.raises(ModuleNotFoundError, match=name.replace("samplers.", "loader.samplers.")):
            importlib.import_module(name)


def test_the_finder_is_the_last_one():
    assert [type(finder) for finder in sys.meta_path].count(moved.MovedFinder) == 1
    assert block.BlockSampler.__module__ == "stocache.loader.samplers.block"
