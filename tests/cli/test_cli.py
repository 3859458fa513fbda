import ast
import json
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

import stocache
from stocache import OnDiskBlockDataStorage, RaggedCache, SharedCache, prepare
from stocache.system import limits
from stocache.system.limits import GIB, CgroupMemory, Memory


@pytest.mark.leaves_descriptors
def test_bench_prints_a_table_and_writes_csv_and_plot(run, tmp_path):
    pytest.importorskip("PIL", reason="needs the extra bench")
    from stocache.cli.bench import photo_like

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
    assert "R² of a straight line" in result.output
    result = run("bench", photos, "--size", 8, "--workers", 0, "--fractions", "0,100", "--warm-pages", "--out", tmp_path)
    assert "left in the page cache" in result.output
    assert "R²" not in result.output  # any two points lie on a line


@pytest.mark.leaves_descriptors
@pytest.mark.parametrize(
    ("out", "made"),
    [
        ("a/b", {"a/b/stocache-bench.csv", "a/b/stocache-bench.png"}),
        ("a/today.csv", {"a/today.csv", "a/today.png"}),
        ("a/today.png", {"a/today.csv", "a/today.png"}),
        ("today.1", {"today.1/stocache-bench.csv", "today.1/stocache-bench.png"}),
    ],
)
def test_bench_makes_the_folder_of_its_results(run, tmp_path, monkeypatch, out, made):
    pytest.importorskip("PIL", reason="needs the extra bench")
    from stocache.cli.bench import photo_like

    (tmp_path / "photos").mkdir()
    photo_like(0, 32).save(tmp_path / "photos" / "0.jpg")
    monkeypatch.chdir(tmp_path)
    result = run("bench", "photos", "--size", 8, "--workers", 0, "--fractions", "0,100", "--out", out)
    assert result.exit_code == 0, result.output
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.suffix in (".csv", ".png")}
    assert found == made
    assert "1 photo from photos" in result.output


@pytest.mark.parametrize("command", [["--version"], ["--version", "info"]])
def test_version(run, command):
    assert run(*command).stdout == f"stocache {stocache.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nonexistent"], "is not a folder"),
        (["."], "holds no .jpg or .jpeg files"),
        (["--fractions", "many"], "write percentages such as 0,25,50,75,100"),
        (["--fractions", "0,101"], "percentages lie between 0 and 100"),
        (["--fractions", "nan"], "percentages lie between 0 and 100"),
        (["--out", "/dev/null/results"], "--out /dev/null/results: /dev/null/results cannot be made: Not a directory."),
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


def imported_by(*command):
    """Return the modules that a fresh interpreter imports for ``python *command``."""
    command = [sys.executable, "-X", "importtime", *map(str, command)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


@pytest.mark.parametrize(
    ("command", "absent"),
    [
        ("-c 'import stocache'", {"psutil", "typer", "rich", "stocache.cli"}),
        ("-m stocache --help", {"psutil", "rich"}),
        ("-m stocache info", {"rich"}),
        ("-m stocache ls", set()),
        ("-m stocache stat light", {"rich"}),
        ("-m stocache rm light --force", {"rich"}),
    ],
)
def test_light_commands_do_not_import_torch(command, absent):
    with SharedCache(1, 10, (4,), name="light"), RaggedCache("1MB", 10, name="varying"):
        assert not imported_by(*shlex.split(command)) & ({"torch", "numpy", "safetensors", "tqdm"} | absent)


def test_exports_are_imported_on_first_use():
    source = ast.parse(Path(stocache.__file__).read_text())
    (block,) = [node for node in source.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    exported = {alias.name: node.module for node in block.body for alias in node.names}
    assert exported == stocache._MODULES  # what a type checker sees is what there is
    assert {*stocache.__all__} <= {*dir(stocache)}
    for name, module in exported.items():
        assert getattr(stocache, name) is getattr(import_module(module), name)
    with pytest.raises(AttributeError, match="module 'stocache' has no attribute 'Cache'"):
        _ = stocache.Cache


@pytest.mark.parametrize("code", ["import stocache; stocache.loader.DataLoader", "from stocache import loader, prepare"])
def test_subpackages_are_found_as_ever(code):
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_stocache_has_no_side_effects():
    """No descriptor, file, thread or process."""
    code = """
import os, threading
import torch, tqdm

def holdings():
    ours = [name for name in os.listdir("/dev/shm") if name.startswith("stocache")]
    return os.listdir("/proc/self/fd"), ours, threading.active_count()

before = holdings()
from stocache import *
assert holdings() == before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------------------------------------------- prepared folders


@pytest.fixture
def photos(tmp_path):
    """A folder of 10 files that are called photos, in two classes."""
    for number in range(10):
        path = tmp_path / "photos" / ("even" if number % 2 == 0 else "odd") / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([number]) * 100)
    return tmp_path / "photos"


@pytest.fixture
def out(run, photos, tmp_path):
    """A prepared folder of 3 blocks."""
    result = run("prepare", photos, tmp_path / "out", "--workers", 0, "--block-size", 4)
    assert result.exit_code == 0, result.output
    return tmp_path / "out"


def blocks(out):
    return sorted((out / "blocks").iterdir())


def everything(out):
    with OnDiskBlockDataStorage(out) as storage:
        return [storage.load_sample(idx) for idx in range(len(storage))]


def fails(result, message):
    """Whether a command failed with one line that says so, beside a progress bar."""
    assert result.exit_code == 1, result.output
    return [message in line for line in lines(result)] == [True]


def lines(result):
    """The output without progress bars."""
    return [text for line in result.output.splitlines() if (text := re.split(r"/s\]|s/\w+\]", line)[-1])]


def test_prepare_says_how_to_use_what_it_made(run, photos, tmp_path):
    result = run("prepare", photos, tmp_path / "out", "--workers", 2, "--block-size", 4)
    assert result.exit_code == 0
    size = limits.format_size(sum(path.stat().st_size for path in blocks(tmp_path / "out")))
    assert f"out: 10 samples in 3 blocks of 4, {size}. In Python: " in result.output
    call = lines(result)[0].partition("In Python: ")[2]
    dataset = eval(call, {"stocache": stocache})
    assert dataset[3] == {"image": bytes([6]) * 100, "name": "even/6.jpg", "label": 0}
    assert dataset.storage.load_dataset_info() == {"classes": ["even", "odd"]}


def test_prepare_takes_the_options_of_prepare(run, tmp_path):
    array = np.random.default_rng(0).integers(0, 9, (50, 25))
    np.save(tmp_path / "a.npy", array)
    options = ("--workers", 0, "--block-bytes", "1000", "--shuffle-seed", 3, "--fingerprint", "v1")
    assert run("prepare", tmp_path / "a.npy", tmp_path / "out", *options).exit_code == 0
    expected = prepare(array, tmp_path / "2", block_bytes=1000, shuffle_seed=3, fingerprint="v1", info={}, progress=False)
    assert all(map(np.array_equal, everything(tmp_path / "out"), everything(tmp_path / "2")))
    with OnDiskBlockDataStorage(tmp_path / "out") as storage:
        assert storage.index.plan == expected.index.plan | {"source": "NpyFile"}
        assert storage.block_size == expected.block_size == 5


def test_prepare_shuffles_parquet(run, tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="comes with the extra test")
    from pyarrow.parquet import write_table

    write_table(arrow.table({"n": list(range(20))}), tmp_path / "t.parquet", row_group_size=3)
    options = ("--workers", 0, "--block-size", 4, "--shuffle-seed", 3)
    assert run("prepare", tmp_path / "t.parquet", tmp_path / "out", *options).exit_code == 0
    numbers = [sample["n"] for sample in everything(tmp_path / "out")]
    assert numbers == np.random.default_rng(3).permutation(20).tolist()


def test_prepare_again_says_so_and_refuses_another_size(run, tmp_path):
    image = pytest.importorskip("PIL.Image", reason="needs the extra bench")
    (tmp_path / "photos").mkdir()
    image.new("RGB", (4, 4), "red").save(tmp_path / "photos" / "a.png")
    arguments = ("prepare", tmp_path / "photos", tmp_path / "out", "--workers", 0, "--size")
    assert "out: 1 samples" in run(*arguments, 2).output
    assert everything(tmp_path / "out")[0]["image"].shape == torch.Size([3, 2, 2])
    assert "out was prepared already: 1 samples" in run(*arguments, 2).output
    again = run(*arguments, 3)
    assert again.exit_code == 1
    assert "is prepared in another way: size of images of the source: 2, now 3.\n" in again.output
    assert "--again" in again.output


def test_prepare_goes_on_where_it_was_interrupted_or_starts_again(run, photos, tmp_path):
    arguments = ("prepare", photos, tmp_path / "out", "--workers", 0, "--block-size", 2)
    (photos / "odd" / "9.jpg").write_bytes(b"")
    assert fails(run(*arguments), "odd/9.jpg cannot be read as an image: it is empty")
    made = {path.name: path.stat().st_mtime_ns for path in blocks(tmp_path / "out")}
    assert len(made) == 4
    assert fails(run(*arguments), "odd/9.jpg")
    assert {path.name: path.stat().st_mtime_ns for path in blocks(tmp_path / "out")} == made
    assert fails(run(*arguments, "--no-resume"), "odd/9.jpg")
    assert not {path.stat().st_mtime_ns for path in blocks(tmp_path / "out")} & set(made.values())
    (photos / "odd" / "9.jpg").write_bytes(b"9")
    assert run(*arguments).exit_code == 0
    assert everything(tmp_path / "out")[9]["image"] == b"9"


def test_prepare_explains_what_it_cannot_do(run, photos, tmp_path):
    assert fails(run("prepare", tmp_path / "none", tmp_path / "out"), "does not exist. Accepted: a folder of images")
    assert fails(run("prepare", photos, photos, "--workers", 0), "which stocache did not write. Give a new folder.")
    assert fails(run("prepare", photos, photos / "odd" / "1.jpg", "--workers", 0), "File exists")
    assert fails(run("prepare", photos, tmp_path / "out", "--block-bytes", "much"), "'much' is not a size")
    result = run("prepare", photos, tmp_path / "out", "--block-bytes", "1MB", "--block-size", 3)
    assert result.exit_code == 2
    assert "give --block-size or --block-bytes, not both" in " ".join(result.output.split())


def test_inspect_shows_a_tree(run, tmp_path):
    samples = [
        {"image": torch.zeros(3, 4, number + 1), "tokens": [1] * number, "meta": ("x", None if number else 1.5), "id": 2**70}
        for number in range(3)
    ]
    prepare(samples, tmp_path / "out", info={"classes": ["cat"] * 1000}, fingerprint="v1", progress=False)
    rows = [line.split(maxsplit=1) for line in lines(run("inspect", tmp_path / "out"))]
    assert ["samples", "3"] in rows
    assert ["info", "{'classes': ['cat', 'cat', 'cat', 'cat', 'cat', 'cat', ...]}"] in rows
    assert any(name == "plan" and "fingerprint 'v1'" in plan for name, plan in rows)
    assert rows[5:] == [
        ["structure", "dict"],
        ["'image'", "tensor float32 ?x?x?"],
        ["'tokens'", "one of"],
        ["or", "list"],
        ["or", "list of int ?"],
        ["'meta'", "tuple"],
        ["0", "str"],
        ["1", "one of"],
        ["or", "float"],
        ["or", "None"],
        ["'id'", "int"],
    ]


@pytest.mark.parametrize(
    ("sample", "line"),
    [
        (torch.zeros(2, 3, dtype=torch.bfloat16), "tensor bfloat16 2x3"),
        (np.zeros((2, 3), ">i2"), "array >i2 2x3"),
        (np.float32(1), "scalar <f4"),
        ([1.5, 2.5], "list of float 2"),
        (["x"] * 17, "list of any length"),
        (Memory, "pickled"),
        ({}, "dict"),
    ],
)
def test_inspect_names_what_samples_are_made_of(run, tmp_path, sample, line):
    prepare([sample], tmp_path / "out", progress=False, allow_pickle=True)
    assert run("inspect", tmp_path / "out").output.splitlines()[5].split(maxsplit=1) == ["structure", line]


def test_inspect_as_json_is_in_bytes_and_whole(run, out):
    facts = json.loads(run("inspect", out, "--json").stdout)
    assert facts["samples"] == 10
    assert (facts["blocks"], facts["block_size"]) == (3, 4)
    assert facts["bytes"] == sum(path.stat().st_size for path in blocks(out))
    assert facts["structure"]["keys"] == ["image", "name", "label"]
    assert facts["info"] == {"classes": ["even", "odd"]}
    assert facts["plan"]["source"] == "ImageFolder"


def test_inspect_reads_no_blocks(run, out):
    for path in blocks(out):
        path.unlink()
    assert run("inspect", out).exit_code == 0


def test_inspect_shows_an_info_that_is_no_json_and_none_that_is_pickled(run, tmp_path):
    prepare([1], tmp_path / "tensor", info={"mean": torch.ones(1)}, progress=False)
    prepare([1], tmp_path / "pickled", info={"mean": Memory}, progress=False, allow_pickle=True)
    assert "info       {'mean': tensor([1.])}" in run("inspect", tmp_path / "tensor").output
    assert json.loads(run("inspect", tmp_path / "tensor", "--json").stdout)["info"] == "{'mean': tensor([1.])}"
    assert "not shown: " in run("inspect", tmp_path / "pickled").output
    path = tmp_path / "tensor" / "info.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert fails(run("inspect", tmp_path / "tensor"), "info.safetensors is damaged")


def test_an_empty_dataset_is_inspected_and_checked(run, tmp_path):
    prepare([], tmp_path / "out", progress=False)
    assert "structure  no samples" in run("inspect", tmp_path / "out").output
    assert "0 blocks, 0 samples, no damage" in run("check", tmp_path / "out").output


@pytest.mark.parametrize("workers", [0, 2])
def test_check_lists_all_damage(run, out, workers):
    result = run("check", out, "--workers", workers)
    assert (result.exit_code, lines(result)) == (0, ["3 blocks, 10 samples, no damage"])
    first, second, _ = blocks(out)
    data = bytearray(first.read_bytes())
    data[-200] ^= 1
    first.write_bytes(data)
    second.unlink()
    (out / "blocks" / "000003.safetensors").write_bytes(b"")
    result = run("check", out, "--workers", workers)
    assert result.exit_code == 1
    assert f"stocache prepare SRC {out} --repair" in result.stderr
    assert [line.partition(" (")[0].partition(". ")[0] for line in result.stdout.splitlines()] == [
        f"{first} is damaged",
        f"{second} is missing.",
        f"{out}/blocks/000003.safetensors is not in the index: nothing reads it",
    ]


def test_check_covers_the_info(run, tmp_path):
    prepare([1], tmp_path / "out", info={"mean": torch.ones(100)}, progress=False)
    path = tmp_path / "out" / "info.safetensors"
    assert run("check", tmp_path / "out", "--workers", 0).exit_code == 0
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    assert fails(run("check", tmp_path / "out", "--workers", 0), f"{path} is damaged")
    path.unlink()
    assert fails(run("check", tmp_path / "out", "--workers", 0), f"{path} is missing")


def test_check_lists_blocks_that_the_disk_fails_to_read(run, out, monkeypatch):
    def check(storage, number):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(OnDiskBlockDataStorage, "check", check)
    result = run("check", out, "--workers", 0)
    assert result.exit_code == 1
    assert result.output.count(".safetensors cannot be read: [Errno 5] Input/output error.") == 3


@pytest.mark.parametrize("command", ["inspect", "check"])
def test_a_folder_that_is_not_prepared_or_damaged_is_named(run, out, command):
    index = out / "index.json"
    text = index.read_text()
    for damaged in (text[:-10], text.replace('"samples": 10', '"samples": 11'), "", "[]"):
        index.write_text(damaged)
        assert fails(run(command, out), "index.json is ")
    index.unlink()
    assert fails(run(command, out), "index.json is missing: nothing was prepared there, or not completely.")
    assert fails(run(command, out / "nothing"), "index.json is missing")
    index.mkdir()
    assert fails(run(command, out), "Is a directory")


def run_alone(*arguments):
    command = [sys.executable, "-m", "stocache", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_an_error_of_a_worker_is_one_line(photos, tmp_path):
    (photos / "odd" / "9.jpg").write_bytes(b"")
    result = run_alone("prepare", photos, tmp_path / "out", "--workers", 2, "--block-size", 2)
    message = f"{photos}/odd/9.jpg cannot be read as an image: it is empty. Repair, convert or remove it."
    assert (result.returncode, result.stdout, result.stderr.splitlines()[-1]) == (1, "", message)
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_errors_go_to_stderr_and_damage_to_stdout(out):
    (out / "index.json").unlink()
    inspected, checked = run_alone("inspect", out), run_alone("check", out)
    assert (inspected.returncode, checked.returncode) == (1, 1)
    assert (
        inspected.stderr
        == checked.stdout
        == (f"{out}/index.json is missing: nothing was prepared there, or not completely. Prepare it.\n")
    )
    assert inspected.stdout == checked.stderr == ""
