"""Programs as people write them give the same, bit for bit, with the one line and without.

Each runs twice, side by side in processes of its own: plain, and cached. All batches of three epochs, or the losses and
weights of a training, are compared: types, dtypes, shapes, strides and bytes.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmark.support.describe import difference
from tests.programs.running import WARNED

ROOT = Path(__file__).parents[2]
PHOTOS = ROOT.parent / "shared" / "data" / "photos"


def case(program, /, slow=False, **options):
    marks = [pytest.mark.slow] if slow else []
    name = "-".join([program, *(str(value) for value in options.values())])
    return pytest.param(program, options, id=name.replace(" ", "_"), marks=marks)


def execute(program, options, folder, timeout_s=120):
    """Run a program without and with the one line; return what the ranks of each have written down, and stderr."""
    for way in ("plain", "cached"):
        (folder / way / "data").mkdir(parents=True)
    command = [sys.executable, "-m", f"tests.programs.{program}", "both", "data", json.dumps(options), "out.pickle"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "PYTHONHASHSEED": "0",  # MONAI walks over sets of str
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "huggingface"),
        "TOKENIZERS_PARALLELISM": "false",
        "STOCACHE_TEST_PHOTOS": str(PHOTOS),
    }
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, told = process.communicate(timeout=timeout_s)  # until all of its processes have closed it
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, told = process.communicate()
        code = f"hang: not over after {timeout_s} s"
    assert code == 0, f"{program}: {code}\n{told[-4000:]}"
    written = [sorted((folder / way).glob("out.pickle*")) for way in ("plain", "cached")]
    return *([pickle.loads(path.read_bytes()) for path in paths] for paths in written), told


def compare(program, options, folder):
    """Demand the same results without and with the one line, and that there was a cache."""
    plain, cached, told = execute(program, options, folder)
    assert len(plain) == len(cached)
    for without, rank in zip(plain, cached, strict=True):
        assert difference(without["results"], rank["results"]) is None
        assert rank["stats"]
        for stats in rank["stats"]:
            assert stats["hits"] > stats["misses"]  # of three epochs, two come from the cache
            assert (stats["rejected"], stats["refused"]) == (0, 0)
        assert rank["changes"] == [None] * len(rank["changes"])
    assert WARNED not in told
    return cached


@pytest.mark.parametrize(
    ("program", "options"),
    [
        *(
            case("lazy_files", slow=True, kind=kind)
            for kind in ("h5py", "lmdb", "zip", "tar", "raw", "memmap", "memmap rows", "sqlite")
        ),
        case("lazy_files", slow=True, kind="h5py", start_method="spawn", workers=[2]),
        case("lazy_files", slow=True, kind="lmdb", start_method="forkserver", workers=[2]),
        case("lazy_files", splits=True),
        case("lazy_files", slow=True, splits=True, start_method="spawn"),
        *(case("monai_dicts", slow=True, num_workers=workers) for workers in (0, 2)),
        case("monai_dicts", slow=True, suffix=".nii", num_workers=2),
        case("monai_dicts", slow=True, augment=True, num_workers=2),
        case("monai_dicts", slow=True, num_workers=2, start_method="spawn", augment=True),
        *(case("hf_trainer", slow=True, num_workers=workers) for workers in (0, 2)),
        case("hf_trainer", slow=True, padding="max", with_format="torch"),
        case("hf_trainer", slow=True, trained=False, padding="max", num_workers=2),
        case("accelerate_loop", slow=True, num_workers=0),
        case("accelerate_loop", slow=True, num_workers=2),
        case("accelerate_loop", slow=True, seedable=True),
        case("accelerate_loop", slow=True, num_workers=2, start_method="spawn"),
        case("accelerate_loop", slow=True, num_workers=2, ring=True),
        case("timm_loader"),
        case("timm_loader", slow=True, num_workers=2),
        case("timm_loader", slow=True, num_workers=2, start_method="spawn"),
        *(case("hf_transform", slow=True, num_workers=workers) for workers in (0, 2)),
        case("hf_transform", slow=True, num_workers=2, start_method="spawn"),
        case("hf_transform", slow=True, store="encoded"),
        *(case("albumentations_masks", slow=True, num_workers=workers) for workers in (0, 2)),
        case("albumentations_masks", slow=True, num_workers=2, start_method="spawn"),
        *(case("detection", slow=True, num_workers=workers) for workers in (0, 2)),
        case("detection", num_workers=2, flip=True),
        case("detection", num_workers=0, permuted=True),
        case("detection", slow=True, num_workers=2, start_method="spawn"),
        case("worker_init", example=True),
        case("worker_init", slow=True, example=True, start_method="spawn"),
        case("worker_init", slow=True, probe=0),
    ],
)
@pytest.mark.sampled(2)
def test_the_one_line_changes_nothing(program, options, tmp_path):
    compare(program, options, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not PHOTOS.is_dir(), reason="no photographs here")
@pytest.mark.parametrize(
    ("program", "options"),
    [
        *(case("vision", num_workers=workers) for workers in (0, 2)),
        case("vision", num_workers=2, start_method="spawn"),
        case("vision", store="encoded"),
    ],
)
def test_photographs_are_augmented_as_before(program, options, tmp_path):
    compare(program, options, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "num_workers"), [("ddp", 0), ("ddp", 2), ("ddp_fork", 2)])
def test_lightning_trains_on_two_processes_that_share_a_cache(strategy, num_workers, tmp_path):
    name = f"programs-{os.getpid()}"
    ranks = compare("lightning_ddp", {"strategy": strategy, "num_workers": num_workers, "name": name}, tmp_path)
    assert len(ranks) == (2 if strategy == "ddp" else 1)
    for train, _ in (rank["stats"] for rank in ranks):
        assert train["misses"] <= train["dataset_len"]  # by both together
