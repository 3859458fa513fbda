"""The screens of the command line on terminals of several widths."""

import re
from dataclasses import replace

import pytest

from stocache import DiskCache, SharedCacheDDP
from stocache.cache.stats import CacheStats
from stocache.tools.cli import output
from stocache.tools.cli.listing import NamedCache
from stocache.tools.cli.table import table
from tests.support.terminals import shown

LONG = "imagenet-train-256-px-augmented-by-the-team-of-the-second-flo"  # 60 letters and one
STATS = CacheStats(10**7, 1281167, 1281167, 0, 0, 0, 0, 1281167, 1281167, 1281167, 3072, 3072 * 1281167, 3072 * 1281167)
HELD = {
    "memory_bytes": 4 * 10**9,
    "alive": True,
    "created": 1.0,
    "holders": [{"pid": 123456, "command": "python " + "train.py " * 30}] * 3,
}
IN_MEMORY = NamedCache(LONG, f"/dev/shm/{LONG}", stats=STATS, **HELD)
CACHES = [
    IN_MEMORY,
    replace(IN_MEMORY, name="short", path="/dev/shm/short", stats=replace(STATS, filled=5000)),
    NamedCache("broken", "/dev/shm/broken", problem="/dev/shm/broken is a symbolic link, so it is not used."),
]
ON_DISK = replace(IN_MEMORY, name=f"/data/{LONG}", folder=f"/data/{LONG}", limit_bytes=500 * 10**9)
ON_DISK = replace(ON_DISK, stats=replace(STATS, reserved_bytes=500 * 10**9))


@pytest.mark.parametrize("caches", [CACHES, CACHES[1:], [ON_DISK, *CACHES]], ids=["all", "short", "disk"])
@pytest.mark.parametrize("width", [60, 80, 200])
def test_tables_are_never_wider_than_the_terminal(caches, width):
    lines = shown(table(caches), width)
    assert max(map(len, lines)) <= width
    named = [line for line in lines if re.match(r"(/data|imagen|short|broken)", line)]
    states = [re.search(r"\b(live|bad)\b", line)[0] for line in named]
    assert sorted(states) == sorted(cache.state for cache in caches)
    assert all(re.search(r"123456 \(\+2\) py.*…$", line) for line in named if " live " in line and width > 60)
    assert "is a symbolic link" in " ".join(shown(table(CACHES), 200))


@pytest.mark.parametrize("width", [50, 200])
def test_texts_are_broken_between_words(run, tmp_path, monkeypatch, width):
    monkeypatch.setattr(output, "terminal_width", lambda err=False: width)
    with SharedCacheDDP(1, 10, (4,), name=LONG), DiskCache(tmp_path / LONG, "1MB", 10) as cache:
        doctor = ["doctor", "--size-limit-gib", "32", "--disk", cache.disk]
        for arguments in (["info"], doctor, ["stat", LONG], ["stat", cache.disk], ["stat", "nothing"], ["rm", cache.disk]):
            for line in run(*arguments).output.splitlines():  # a path may be longer
                assert len(line) <= width or LONG in line or " " not in line.strip(), (arguments, line)
