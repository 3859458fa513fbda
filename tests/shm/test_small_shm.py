"""The cases of benchmark/small_shm.py: jobs on a tiny, full or read-only /dev/shm complete, with the right samples."""

import os
import subprocess

import pytest

from benchmark.small_shm import CASES, run

LEAST = {  # samples cached at the least
    "1 MiB": 256,
    "64 MiB": 2048,
    "full but for 128 KiB": 256,
    "full": 256,
    "read-only": 256,
    "1 MiB, no memfd": 10,
    "read-only, no memfd": 0,
    "fills up while caching, no memfd": 40,
}


@pytest.fixture(scope="module", autouse=True)
def _needs_root():
    probe = ["unshare", "--mount", "--propagation", "private", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"]
    if os.geteuid() != 0 or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("needs root and mount namespaces")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.sampled(4)
def test_a_job_completes_and_caches_what_it_can(case):
    result = run(case.name, case.mount)
    assert result["filled"] >= LEAST[case.name]
    assert result["hits"] == result["filled"]
    assert result["misses"] == 2 * case.samples - result["filled"]
    assert ("memfd" in result["backing"]) == case.memfd
    if not case.memfd:  # the cache could not have what it was given, and said so once
        assert result["warnings"].count("cache") >= 1
        assert "-shm-size" in result["warnings"]


@pytest.mark.parametrize("name", ["ours, no cache", "ours, cached"])
@pytest.mark.sampled(2)
def test_large_batches_pass_through_the_64_mib_of_docker(name):
    result = run(name, "size=64m")
    assert (result["batches"], result["outside"]) == (20, 0)


def test_where_torchs_do_not():
    with pytest.raises(subprocess.CalledProcessError, match="returned non-zero exit status") as caught:
        run("torch, no cache", "size=64m")
    assert "No space left on device" in caught.value.stderr or "us error" in caught.value.stderr
