"""Cases of benchmark/small_shm.py: jobs on a tiny, full or read-only /dev/shm complete, with the right samples."""

import os
import subprocess

import pytest

from benchmark.small_shm import CASES, in_shm, load, run_case

# Samples cached at the least
LEAST = {"fills up while caching, no memfd": 40, "1 MiB": 256, "full": 256, "read-only, no memfd": 0}


@pytest.fixture(scope="module", autouse=True)
def _needs_root():
    probe = ["unshare", "--mount", "--propagation", "private", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"]
    if os.geteuid() != 0 or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("needs root and mount namespaces")


@pytest.mark.parametrize("name", LEAST)
@pytest.mark.sampled(4)
def test_a_job_completes_and_caches_what_it_can(name):
    case, result = CASES[name], run_case(name)
    assert result["filled"] >= LEAST[name]
    assert result["hits"] == result["filled"]
    assert result["misses"] == 2 * case.samples - result["filled"]
    assert ("memfd" in result["backing"]) == case.memfd
    if not case.memfd:  # the cache could not have what it was given, and said so
        assert "-shm-size" in result["warnings"]


@pytest.mark.slow
def test_large_batches_pass_through_the_64_mib_of_docker():
    assert in_shm("size=64m", load, True, True)["batches"] == 20
