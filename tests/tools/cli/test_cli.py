"""The command as a whole: its version, what it imports, info; and what importing the package does."""

import json
import re
import shlex

import pytest

import stocache
from stocache import RaggedCache, SharedCache
from stocache.system import limits
from stocache.system.limits import GIB, CgroupMemory, Memory
from tests.support.processes import run_python


def test_the_version_and_without_a_command_the_first_three_are_shown(run):
    assert run("--version").stdout == run("--version", "info").stdout == f"stocache {stocache.__version__}\n"
    assert [re.split(" {2,}", line)[0] for line in run().stdout.splitlines()] == [
        "stocache run train.py", "stocache run --cache auto train.py", "stocache bench", "stocache --help",
    ]  # fmt: skip


@pytest.mark.linux
def test_info_shows_what_the_machine_gives(run, monkeypatch):
    cgroup, memory = CgroupMemory(20 * GIB, 10 * GIB, "/sys/fs/cgroup/job"), Memory(20 * GIB, 10 * GIB)
    facts = {"memory": memory, "cgroup_memory": cgroup, "memfd_huge_policy": "never", "has_memfd": False}
    for name, fact in facts.items():
        monkeypatch.setattr(limits, name, lambda fact=fact: fact)
    text = run("info").stdout
    for shown in (
        r"10\.0 GiB available of 20\.0 GiB", r"20\.0 GiB \(/sys/fs/cgroup/job\)", "huge pages +never; 'stocache doctor' says",
        "memfd +forbidden",
    ):  # fmt: skip
        assert re.search(shown, text)
    monkeypatch.setattr(limits, "cgroup_memory", lambda: None)
    facts = json.loads(run("info", "--json").stdout)
    assert (facts["cgroup_limit"], facts["memfd"], facts["memory_total"]) == (None, False, 20 * GIB)
    assert 0 <= facts["recommended_limit"] <= facts["shared_memory_room"] <= facts["memory_available"]


@pytest.mark.parametrize(("command", "absent", "printed"), [
    ("-c 'import stocache'", {"psutil", "typer", "rich", "stocache.tools.cli"}, ""),
    ("-m stocache --help", {"psutil", "rich"}, "bench"),
    ("-m stocache info", {"rich"}, '"auto" takes'),
    ("-m stocache ls", set(), "light"),
    ("-m stocache stat light", {"rich"}, "light"),
    ("-m stocache rm light --force", {"rich"}, "removed"),
])  # fmt: skip
def test_light_commands_do_not_import_torch(command, absent, printed):
    with SharedCache(1, 10, (4,), name="light"), RaggedCache("1MB", 10, name="varying"):
        done = run_python("-X", "importtime", *shlex.split(command))
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert not imported & ({"torch", "numpy", "safetensors", "tqdm"} | absent)
    assert printed in done.stdout


def test_importing_stocache_has_no_side_effects():
    """No descriptor, file, thread or process. Subpackages are found without an import of theirs."""
    code = """
import os, threading, torch, tqdm

def holdings():
    ours = [name for name in os.listdir("/dev/shm") if name.startswith("stocache")]
    return os.listdir("/proc/self/fd"), ours, threading.active_count()

before = holdings()
import stocache
stocache.loader
from stocache import loader, prepare
from stocache import *
assert holdings() == before
"""
    run_python("-c", code)
