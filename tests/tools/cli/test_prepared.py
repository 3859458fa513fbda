"""The commands prepare, inspect and check: what they make, show and find; what is wrong is said in one or two lines."""

import errno
import json
import logging
import os
import re
import shutil

import pytest
import torch
from typer.testing import CliRunner

import stocache
from stocache import OnDiskBlockDataStorage, prepare
from stocache.storage.preparation import prepare as preparing
from stocache.storage.preparation import sources
from stocache.system import limits
from stocache.system.limits import Memory
from stocache.tools.cli.app import app
from tests.support.preparing import damage


def command(*arguments):
    """Return the exit code of a command, and the lines that it prints, without progress bars."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, lines_of(result.output)


def lines_of(output):
    return [text for line in output.splitlines() if (text := re.split(r"/s\]|s/\w+\]", line)[-1].strip())]


def run_prepare(*arguments, blocks=2, workers=0):
    return command("prepare", *arguments, "--block-size", blocks, "--workers", workers)


def fails(outcome, message):
    """Whether a command failed with one line that says so."""
    code, lines = outcome
    assert (code, len(lines), message in "".join(lines)) == (1, 1, True), lines
    return True


@pytest.fixture
def photos(tmp_path):
    """10 files that are called photos."""
    (tmp_path / "photos").mkdir()
    for number in range(10):
        (tmp_path / "photos" / f"{number}.jpg").write_bytes(bytes([number]) * 100)
    return tmp_path / "photos"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def prepared(photos, out):
    """A prepared folder of 5 blocks."""
    assert run_prepare(photos, out)[0] == 0
    return out


def blocks_of(out):
    return sorted((out / "blocks").iterdir())


def numbers(out):
    """The photos in a prepared folder, and why others are not there."""
    with OnDiskBlockDataStorage(out) as storage:
        names = [storage.load_sample(idx)["name"] for idx in range(len(storage))]
        return [int(name.removesuffix(".jpg")) for name in names], [skipped.reason for skipped in storage.load_skipped()]


def test_prepare_says_how_to_use_what_it_made(tmp_path, out):
    classes = tmp_path / "classes"
    for number in range(4):
        folder = classes / ("odd" if number % 2 else "even")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(bytes([number]))
    code, [line] = run_prepare(classes, out, blocks=3)
    size = limits.format_size(sum(path.stat().st_size for path in blocks_of(out)))
    expected, _, call = line.partition(" In Python: ")
    assert (code, expected) == (0, f"{out}: 4 samples in 2 blocks of 3, {size}.")
    dataset = eval(call, {"stocache": stocache})
    assert dataset[1] == {"image": b"\2", "name": "even/2.jpg", "label": 0}
    assert dataset.storage.load_dataset_info() == {"classes": ["even", "odd"]}
    assert f"{out} was prepared already: 4 samples" in run_prepare(classes, out, blocks=3)[1][0]


GIVEN = "--workers", 0, "--block-bytes", 1000, "--shuffle-seed", 3, "--fingerprint", "v1", "--on-error", "skip"
GIVEN += "--no-resume", "--again", "--hash", "--size", 8
TAKEN = {"num_workers": 0, "block_bytes": 1000, "shuffle_seed": 3, "fingerprint": "v1", "resume": False, "again": True}
TAKEN |= {"on_error": "skip", "block_size": None, "engine": "local", "address": None, "info": {"classes": []}}


def test_prepare_takes_the_options_of_prepare_and_of_its_source(photos, out, monkeypatch):
    taken, opened, source = [], [], sources.open_source(photos)
    monkeypatch.setattr(sources, "open_source", lambda path, **options: opened.append(options) or source)
    prepare_quietly = lambda *places, **options: taken.append(options) or prepare(*places, progress=False)
    monkeypatch.setattr(preparing, "prepare", prepare_quietly)
    assert command("prepare", photos, out, *GIVEN)[0] == 0
    assert command("prepare", photos, out, "--block-size", 2)[0] == 0
    for address in ([], ["auto"]):
        assert command("prepare", photos, out, *address, "--ray")[0] == 0
    assert taken[0] == TAKEN
    assert [(options["engine"], options["address"]) for options in taken[2:]] == [("ray", None), ("ray", "auto")]
    assert (taken[1]["block_size"], taken[1]["resume"], taken[1]["again"]) == (2, True, False)
    assert opened[:2] == [{"size": 8, "hashes": True}, {"size": None, "hashes": False}]


def test_a_broken_image_stops_or_is_skipped_which_one_line_of_stderr_says(run, photos, out, monkeypatch):
    for name, value in (("propagate", False), ("handlers", [])):  # as in a process of its own
        monkeypatch.setattr(logging.getLogger("stocache"), name, value)
    (photos / "4.jpg").write_bytes(b"")
    message = f"{photos}/4.jpg cannot be read as an image: it is empty. Repair, convert or remove it."
    for workers in (0, 1):
        assert run_prepare(photos, out, "--on-error", "stop", workers=workers) == (1, [message])
    result = run("prepare", photos, out, "--on-error", "skip", "--workers", 0, "--block-size", 2)
    assert (result.exit_code, numbers(out)) == (0, ([0, 1, 2, 3, 9, 5, 6, 7, 8], [f"StorageError: {message}"]))
    notice = f"{out} lacks 1 of the 10 samples of the source, which cannot be loaded: {out}/skipped.json lists them."
    notice += " (stocache explain W17)"
    assert (result.stdout.count("\n"), lines_of(result.stderr)) == (1, [notice])
    assert f"{out}: 9 samples in 5 blocks of 2" in result.stdout
    assert fails(run_prepare(photos, out), f"{out} lacks 1 of 10 samples, which could not be loaded: see skipped.json. Accept")
    assert any("1 of the source, see skipped.json" in line for line in command("inspect", out)[1])
    assert command("check", out, "--workers", 0)[0] == 0


def test_inspect_shows_a_tree(tmp_path):
    samples = [{"image": torch.zeros(3, 4, number + 1), "tokens": [1] * number, "meta": ("x", None if number else 1.5)}
               for number in range(3)]  # fmt: skip
    prepare(samples, tmp_path / "out", info={"classes": ["cat"] * 1000}, fingerprint="v1", progress=False)
    rows = [line.split(maxsplit=1) for line in command("inspect", tmp_path / "out")[1]]
    assert ["samples", "3"] in rows
    assert ["info", "{'classes': ['cat', 'cat', 'cat', 'cat', 'cat', 'cat', ...]}"] in rows
    assert any(name == "plan" and "fingerprint 'v1'" in plan for name, plan in rows)
    image = ["'image'", "tensor float32 ?x?x?"]
    assert rows[5:] == [
        ["structure", "dict"], image, ["'tokens'", "list"], ["'meta'", "tuple"], ["0", "str"], ["1", "float"],
        ["or", "dict"], image, ["'tokens'", "list of int ?"], ["'meta'", "tuple"], ["0", "str"], ["1", "None"],
    ]  # fmt: skip
    prepare([], tmp_path / "none", progress=False)
    assert "structure  no samples" in command("inspect", tmp_path / "none")[1]
    assert command("check", tmp_path / "none", "--workers", 0)[1] == ["0 blocks, 0 samples, no damage"]


def test_inspect_as_json_is_in_bytes_and_whole_and_reads_no_blocks(prepared):
    size = sum(path.stat().st_size for path in blocks_of(prepared))
    shutil.rmtree(prepared / "blocks")
    facts = json.loads("".join(command("inspect", prepared, "--json")[1]))
    assert (facts["samples"], facts["blocks"], facts["block_size"], facts["bytes"]) == (10, 5, 2, size)
    assert "('image', 'name')" in facts["structure"]["treedefs"][0]
    assert facts["plan"]["source"] == "ImageFolder"


def test_an_info_that_is_no_json_is_shown_one_that_is_pickled_is_not_and_a_damaged_or_missing_one_is_found(tmp_path):
    folder, pickled = tmp_path / "tensor", tmp_path / "pickled"
    prepare([1], folder, info={"mean": torch.ones(1)}, progress=False)
    prepare([1], pickled, info={"mean": Memory}, progress=False, allow_pickle=True)
    assert "info       {'mean': tensor([1.])}" in command("inspect", folder)[1]
    facts = json.loads("".join(command("inspect", folder, "--json")[1]))
    assert facts["info"] == "{'mean': tensor([1.])}"
    assert any("not shown: " in line for line in command("inspect", pickled)[1])
    info = folder / "info.safetensors"
    os.truncate(info, 50)
    assert fails(command("inspect", folder), f"{info} is damaged")
    assert f"{info} is damaged" in command("check", folder, "--workers", 0)[1][-1]
    info.unlink()
    code, lines = command("check", folder, "--workers", 0)
    assert (code, f"{info} is missing" in lines[-1]) == (1, True)


def test_check_lists_all_damage(run, prepared, monkeypatch):
    unused = prepared / "blocks" / "000005.safetensors"
    assert command("check", prepared, "--workers", 0) == (0, ["5 blocks, 10 samples, no damage"])
    first, second, *_ = blocks_of(prepared)
    damage(prepared, first)
    second.unlink()
    unused.write_bytes(b"")
    said = [f"{first} is damaged", f"{second} is missing.", f"{unused} is not in the index: nothing reads it"]
    for workers in (0, 1):
        result = run("check", prepared, "--workers", workers)
        assert (result.exit_code, f"stocache prepare SRC {prepared} --again" in result.stderr) == (1, True)
        assert [line.partition(" (")[0].partition(". ")[0] for line in result.stdout.splitlines()] == said

    def check(storage, number):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(OnDiskBlockDataStorage, "check", check)
    expected = ".safetensors cannot be read: [Errno 5] Input/output error."
    assert any(expected in line for line in command("check", prepared, "--workers", 0)[1])


def test_a_folder_that_is_not_prepared_or_damaged_is_named_as_an_error_or_as_what_check_finds(prepared):
    index = prepared / "index.json"
    text = index.read_text()
    for damaged in (text[:-10], text.replace('"samples": 10', '"samples": 11'), "", "[]"):
        index.write_text(damaged)
        assert all(fails(command(name, prepared), "index.json is ") for name in ("inspect", "check"))
    index.unlink()
    assert fails(command("inspect", prepared), f"{index} is missing: nothing was prepared there")
