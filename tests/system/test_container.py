"""In a container smaller than the cache it is given, a job fills what the container allows and is not killed."""

import json
import os

import pytest

from stocache.system import limits
from stocache.system.limits import MIB
from tests.support.processes import run_python

LIMIT = 700 * MIB
JOB = """
import json, os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
import torch
from stocache import SharedCache
from stocache.system import limits

cache = SharedCache(sys.argv[2], 4000, (3, 256, 256))
for idx in range(4000):
    cache.get_or_load(idx, lambda idx: torch.ones(3, 256, 256, dtype=torch.uint8))
stats = cache.stats()
print(json.dumps([stats.filled_bytes, stats.reserved_bytes, limits.memory().available, limits.cgroup_memory().limit]))
"""


@pytest.fixture
def container():
    """A memory cgroup below this process's own, v1 or v2, as a container has one."""
    if limits.memory().available < 2 * LIMIT or not (dirs := limits._cgroup_dirs(limits.PROC)):
        pytest.skip("needs 1.4 GiB of memory and a memory cgroup")
    group = dirs[0] / f"stocache-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a cgroup: {error}")
    try:
        for name in ("memory.max", "memory.limit_in_bytes"):
            if (group / name).exists():
                (group / name).write_text(str(LIMIT))
                yield group
                return
        pytest.skip("the memory controller is not delegated")
    finally:
        group.rmdir()


@pytest.mark.slow
def test_a_job_fills_what_its_container_allows_and_is_not_killed(container):
    for size_limit, least in (("auto", limits.Memory(LIMIT, 0).floor), ("700MB", 0)):
        job = run_python("-c", JOB, container, size_limit)
        cached, reserved, available, limit = json.loads(job.stdout.splitlines()[-1])
        assert 50 * MIB < cached <= reserved < limit == LIMIT
        assert available > least
        assert ("Caching what fits" in job.stderr) == (size_limit != "auto")  # "auto" asks for no more than there is
