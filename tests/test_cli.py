import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from stocache import limits
from stocache.cli import app
from stocache.limits import GIB, CgroupMemory, Memory


@pytest.fixture
def run():
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, [str(argument) for argument in arguments])


@pytest.mark.leaves_descriptors
def test_bench_prints_a_table_and_writes_csv_and_plot(run, tmp_path):
    pytest.importorskip("PIL", reason="needs the extra bench")
    from stocache.bench import photo_like

    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(4):
        photo_like(number, 32).save(photos / f"{number}.jpg")
    result = run(
        "bench", photos, "--repeat-folder", 2, "--size", 8, "--workers", 0, "--fractions", "100,0,50", "--out", tmp_path
    )
    assert result.exit_code == 0, result.output
    assert "8 photos" in result.output
    assert "dropped from the page cache before each epoch" in result.output
    lines = [line.split("|") for line in result.stdout.splitlines() if line.startswith("|")]
    assert [line[1].strip() for line in lines[2:]] == ["0%", "50%", "100%"]
    assert [line[7].strip() for line in lines[2:]] == ["8", "4", "0"]
    assert (tmp_path / "stocache-bench.csv").read_text().count("\n") == 4
    assert (tmp_path / "stocache-bench.png").stat().st_size > 5000
    result = run("bench", photos, "--size", 8, "--workers", 0, "--fractions", "100", "--warm-pages", "--out", tmp_path)
    assert "left in the page cache" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nonexistent"], "is not a folder"),
        (["."], "holds no .jpg or .jpeg files"),
        (["--fractions", "many"], "write percentages such as 0,25,50,75,100"),
        (["--fractions", "0,101"], "percentages lie between 0 and 100"),
        (["--fractions", "nan"], "percentages lie between 0 and 100"),
        (["--out", "/nonexistent"], "is not a folder to write the results to"),
        (["--workers", "-1"], "Invalid value for '--workers'"),
    ],
)
def test_bench_explains_what_it_cannot_do(run, tmp_path, monkeypatch, arguments, message):
    pytest.importorskip("PIL", reason="needs the extra bench")
    monkeypatch.chdir(tmp_path)
    result = run("bench", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_bench_names_the_extra_it_needs(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    result = run("bench")
    assert result.exit_code == 2
    assert "pip install 'stocache[bench]'" in " ".join(result.output.split())


def test_info_shows_what_the_machine_gives(run, monkeypatch):
    monkeypatch.setattr(limits, "memory", lambda: Memory(20 * GIB, 10 * GIB))
    monkeypatch.setattr(limits, "cgroup_memory", lambda: CgroupMemory(20 * GIB, 10 * GIB, "/sys/fs/cgroup/job"))
    monkeypatch.setattr(limits, "memfd_huge_policy", lambda: "never")
    monkeypatch.setattr(limits, "has_memfd", lambda: False)
    result = run("info")
    assert result.exit_code == 0
    assert "10.0 GiB available of 20.0 GiB" in result.output
    assert "20.0 GiB (/sys/fs/cgroup/job)" in result.output
    assert "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled" in result.output
    assert "memfd          forbidden" in result.output


def test_info_as_json_is_in_bytes(run, monkeypatch):
    monkeypatch.setattr(limits, "cgroup_memory", lambda: None)
    facts = json.loads(run("info", "--json").stdout)
    assert facts["shm_total"] == limits.shm_total()
    assert facts["cgroup_limit"] is None
    assert 0 < facts["recommended_limit"] <= facts["shared_memory_room"] <= facts["memory_available"]


def test_the_module_is_the_command():
    result = subprocess.run([sys.executable, "-m", "stocache", "info"], capture_output=True, text=True, check=True)
    assert '"auto" takes' in result.stdout


def test_importing_stocache_has_no_side_effects():
    """No descriptor, file, thread or process, and neither the command line nor the bench modules."""
    code = """
import os, sys, threading
import numpy, psutil, torch

def holdings():
    return os.listdir("/proc/self/fd"), os.listdir("/dev/shm"), threading.active_count()

before, known = holdings(), set(sys.modules)
import stocache
assert holdings() == before
assert not {"typer", "tqdm", "matplotlib", "PIL", "stocache.cli", "stocache.bench"} & (set(sys.modules) - known)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
