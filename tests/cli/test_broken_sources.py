"""The command prepare on sources that are broken, unreadable or change meanwhile: one or two lines say so, and what to do."""

import logging
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stocache import OnDiskBlockDataStorage
from stocache.cli.app import app
from stocache.preparation.sources import CsvFile, ImageFolder
from stocache.storage import local
from tests.support.processes import in_child, wait_until

ANOTHER_USER = 54321 if os.geteuid() == 0 else os.geteuid()


@pytest.fixture
def place():
    """A folder that another user may use, too, with 10 files that are called photos."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    (folder / "photos").mkdir()
    for number in range(10):
        (folder / "photos" / f"{number}.jpg").write_bytes(bytes([number]) * 100)
    yield folder
    shutil.rmtree(folder)


def run(*arguments, blocks=2, workers=0):
    """Return the exit code of the command prepare, and the lines that it prints."""
    return command("prepare", *arguments, "--block-size", blocks, "--workers", workers)


def command(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, lines_of(result.output)


def lines_of(output):
    """The lines without progress bars."""
    return [text for line in output.splitlines() if (text := re.split(r"/s\]|s/\w+\]", line)[-1].strip())]


def numbers(folder):
    """The photos in a prepared folder."""
    with OnDiskBlockDataStorage(folder) as storage:
        return [int(storage.load_sample(idx)["name"].removesuffix(".jpg")) for idx in range(len(storage))]


def damage_block(folder):
    path = folder / "blocks" / "000001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")


# ---------------------------------------------------------------------------------------------------- broken


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_image_stops_or_is_skipped(place, caplog, workers):
    photos, out = place / "photos", place / "out"
    (photos / "4.jpg").write_bytes(b"")
    message = f"{photos}/4.jpg cannot be read as an image: it is empty. Repair, convert or remove it."
    assert run(photos, out, workers=workers) == (1, [message])
    assert run(photos, out, "--on-error", "stop", workers=workers) == (1, [message])
    code, [line] = run(photos, out, "--on-error", "skip", workers=workers)
    assert (code, numbers(out)) == (0, [0, 1, 2, 3, 9, 5, 6, 7, 8])
    assert f"{out}: 9 samples in 5 blocks of 2" in line
    notice = f"{out} lacks 1 of the 10 samples of the source, which cannot be loaded: {out}/skipped.json lists them."
    assert [record.getMessage() for record in caplog.records] == [notice]
    with OnDiskBlockDataStorage(out) as storage:
        [sample] = storage.load_skipped()
    assert (sample.index, sample.name, sample.reason) == (4, f"{photos}/4.jpg", f"StorageError: {message}")
    code, [line] = run(photos, out)
    assert code == 1
    assert line.startswith(f"{out} lacks 1 of 10 samples, which could not be loaded: see skipped.json. Accept that (")
    inspected = CliRunner().invoke(app, ["inspect", str(out)]).output
    assert "1 of the source, see skipped.json" in inspected
    assert CliRunner().invoke(app, ["check", str(out), "--workers", "0"]).exit_code == 0
    (photos / "4.jpg").write_bytes(b"4")
    assert run(photos, out, "--on-error", "skip")[0] == 1  # the source has changed
    assert run(photos, out, "--again")[0] == 0
    assert numbers(out) == list(range(10))
    assert not (out / "skipped.json").exists()


def test_the_command_prints_one_line_about_skipped_samples(place):
    (place / "photos" / "4.jpg").write_bytes(b"")
    arguments = ["prepare", place / "photos", place / "out", "--on-error", "skip", "--workers", "0"]
    done = subprocess.run([sys.executable, "-m", "stocache", *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout.count("\n")) == (0, 1)
    notice = (
        f"{place}/out lacks 1 of the 10 samples of the source, which cannot be loaded: {place}/out/skipped.json lists them."
    )
    assert lines_of(done.stderr) == [notice]


def test_images_that_cannot_be_decoded_are_skipped(place):
    image = pytest.importorskip("PIL.Image", reason="needs the extra bench")
    photos = place / "png"
    photos.mkdir()
    for number in range(6):
        image.new("RGB", (40, 40), (number, 0, 0)).save(photos / f"{number}.png")
    os.truncate(photos / "1.png", 60)
    (photos / "3.png").write_text("a page that says 404")
    code, [line] = run(photos, place / "out", "--size", 8)
    assert (code, "1.png cannot be read as an image" in line) == (1, True)
    assert run(photos, place / "out", "--size", 8, "--on-error", "skip")[0] == 0
    with OnDiskBlockDataStorage(place / "out") as storage:
        assert [int(storage.load_sample(idx)["image"][0, 0, 0]) for idx in range(4)] == [0, 4, 2, 5]


def test_rows_of_a_broken_part_of_a_parquet_file_are_skipped_and_named(place):
    arrow = pytest.importorskip("pyarrow", reason="comes with the extra test")
    from pyarrow.parquet import read_metadata, write_table

    parts = place / "parts"
    parts.mkdir()
    for part in range(2):
        table = arrow.table({"n": list(range(part * 100, part * 100 + 100))})
        write_table(table, parts / f"{part}.parquet", row_group_size=20, use_dictionary=False)
    path = parts / "1.parquet"
    begin = read_metadata(path).row_group(2).column(0).data_page_offset
    data = path.read_bytes()
    path.write_bytes(data[:begin] + bytes(20) + data[begin + 20 :])
    code, [line] = run(parts, place / "out")
    assert (code, "1.parquet cannot be read as parquet" in line) == (1, True)
    code, [line] = run(parts, place / "out", "--on-error", "skip", "--shuffle-seed", 3)
    assert (code, "Leave out on_error='skip' (--on-error skip); for Parquet files, shuffle_seed" in line) == (1, True)
    assert run(parts, place / "out", "--on-error", "skip", blocks=16)[0] == 0
    with OnDiskBlockDataStorage(place / "out") as storage:
        assert sorted(storage.load_sample(idx)["n"] for idx in range(180)) == [*range(140), *range(160, 200)]
        skipped = storage.load_skipped()
    assert [skipped[0].name, skipped[-1].name] == [f"{path}, row 40", f"{path}, row 59"]


def test_a_source_of_which_nothing_can_be_read_is_an_error(place):
    for path in (place / "photos").iterdir():
        path.write_bytes(b"")
    code, [line] = run(place / "photos", place / "out", "--on-error", "skip")
    assert code == 1
    assert line.startswith("Not one of the 10 samples of the source can be loaded. The last one: StorageError: ")


def test_an_unknown_on_error_is_refused(place):
    assert run(place / "photos", place / "out", "--on-error", "ignore")[0] == 2
    assert not (place / "out").exists()


# ---------------------------------------------------------------------------------------------------- unreadable


def as_another_user(place, *arguments, run=run):
    """Run the command as a user who is not root; return what ``run`` returns."""
    CliRunner().invoke(
        app, ["prepare", str(place / "photos"), str(place / "photos")]
    )  # imports what that user may not be able to read

    def act():
        code, lines = run(*arguments)
        (place / "outcome").write_text("\n".join([str(code), *lines]))

    assert in_child(act, uid=ANOTHER_USER) == 0
    code, *lines = (place / "outcome").read_text().splitlines()
    return int(code), lines


def test_a_file_that_may_not_be_read_stops_or_is_skipped(place):
    photos, out = place / "photos", place / "out"
    (photos / "4.jpg").chmod(0)
    code, [line] = as_another_user(place, photos, out)
    assert (code, "4.jpg cannot be read as an image: [Errno 13] Permission denied" in line) == (1, True)
    code, _ = as_another_user(place, photos, out, "--on-error", "skip")
    assert (code, numbers(out)) == (0, [0, 1, 2, 3, 9, 5, 6, 7, 8])
    with OnDiskBlockDataStorage(out) as storage:
        assert "Permission denied" in storage.load_skipped()[0].reason


@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize("what", ["photos", "classes/cats", "table.csv", "table.npy"])
def test_a_source_that_may_not_be_read_is_one_line(place, what, on_error):
    (place / "classes" / "cats").mkdir(parents=True)
    (place / "table.csv").write_text("a\n1\n")
    (place / "table.npy").write_bytes(b"")
    (place / what).chmod(0)
    source = place / what.removesuffix("/cats")
    code, [line] = as_another_user(place, source, place / "out", "--on-error", on_error)
    assert (code, "Permission denied" in line, str(place / what) in line) == (1, True, True)


@pytest.mark.parametrize("name", ["check", "inspect"])
def test_a_prepared_folder_that_may_not_be_read_is_one_line(place, name):
    assert run(place / "photos", place / "out")[0] == 0
    (place / "out").chmod(0)
    code, [line] = as_another_user(place, name, place / "out", run=command)
    assert (code, "Permission denied" in line, str(place / "out") in line) == (1, True, True)


def test_a_folder_that_may_not_be_written_is_one_line(place):
    out = place / "out"
    out.mkdir(mode=0o755)
    code, [line] = as_another_user(place, place / "photos", out)
    assert (code, "Permission denied" in line, str(out) in line) == (1, True, True)


# ---------------------------------------------------------------------------------------------------- changed or gone


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_an_image_that_goes_while_the_folder_is_prepared_is_told_and_not_skipped(place, monkeypatch, on_error):
    photos, out, read = place / "photos", place / "out", ImageFolder._image

    def remove_and_read(source, path):
        (photos / "7.jpg").unlink(missing_ok=True)
        return read(source, path)

    with monkeypatch.context() as patched:
        patched.setattr(ImageFolder, "_image", remove_and_read)
        code, [line] = run(photos, out, "--on-error", on_error)
    kind = {"stop": "an image", "skip": "a part of the source"}[on_error]
    assert (code, f"7.jpg cannot be read as {kind}: [Errno 2] No such file" in line) == (1, True)
    assert not (out / "skipped.json").exists()
    assert run(photos, out, "--on-error", on_error)[0] == 0
    assert numbers(out) == [0, 1, 2, 3, 4, 5, 6, 8, 9]


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_table_that_is_cut_while_it_is_prepared_is_told_and_not_skipped(place, monkeypatch, on_error):
    table, read = place / "table.csv", CsvFile._sample
    table.write_text("a,b\n" + "".join(f"{row},{row}\n" for row in range(100)))

    def cut_and_read(source, idx):
        os.truncate(table, 200)
        return read(source, idx)

    with monkeypatch.context() as patched:
        patched.setattr(CsvFile, "_sample", cut_and_read)
        code, [line] = run(table, place / "out", "--on-error", on_error)
    wanted = {"stop": "table.csv cannot be read as a table: it is cut", "skip": "was changed while"}[on_error]
    assert (code, wanted in line) == (1, True)
    assert not (place / "out" / "index.json").exists()
    assert not (place / "out" / "skipped.json").exists()


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_an_image_that_is_gone_before_a_preparation_goes_on_is_of_another_source(place, on_error):
    photos, out = place / "photos", place / "out"
    (photos / "9.jpg").write_bytes(b"")
    assert run(photos, out)[0] == 1
    assert len(list((out / "blocks").iterdir())) == 4
    for number in (3, 9):
        (photos / f"{number}.jpg").unlink()
    assert run(photos, out, "--on-error", on_error)[0] == 0
    assert numbers(out) == [0, 1, 2, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_repair_from_a_source_that_has_lost_an_image_says_so_and_changes_nothing(place, on_error):
    photos, out = place / "photos", place / "out"
    assert run(photos, out)[0] == 0
    damage_block(out)
    (photos / "3.jpg").unlink()
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    code, lines = run(photos, out, "--repair", "--on-error", on_error)
    assert (code, len(lines)) == (1, 2)
    assert lines[0].startswith(f"{out} is prepared in another way: samples: 10, now 9; ")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_repair_from_a_source_that_cannot_be_read_now_is_one_line(place, on_error):
    photos, out = place / "photos", place / "out"
    assert run(photos, out, "--fingerprint", "v1")[0] == 0
    damage_block(out)
    (photos / "3.jpg").write_bytes(b"")
    code, [line] = run(photos, out, "--repair", "--fingerprint", "v1", "--on-error", on_error)
    assert (code, "3.jpg cannot be read as an image: it is empty" in line) == (1, True)
    assert not (out / "skipped.json").exists()


def test_a_repair_without_the_source_is_one_line(place):
    photos, out = place / "photos", place / "out"
    assert run(photos, out)[0] == 0
    damage_block(out)
    shutil.rmtree(photos)
    code, [line] = run(photos, out, "--repair")
    assert (code, line.startswith(f"{photos} does not exist. Accepted: ")) == (1, True)


# ---------------------------------------------------------------------------------------------------- two at a time


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_command_waits_for_the_process_that_prepares_the_folder(place, monkeypatch, caplog, on_error):
    photos, out, flag, read = place / "photos", place / "out", place / "flag", ImageFolder._image
    (photos / "4.jpg").write_bytes(b"")

    def wait_and_read(source, path):
        wait_until(flag.exists)
        return read(source, path)

    def prepare_slowly():
        ImageFolder._image = wait_and_read  # in this process
        assert run(photos, out, "--on-error", "skip")[0] == 0

    class SetFlag(logging.Handler):
        def emit(self, record):
            flag.touch()

    monkeypatch.setattr(local, "_REPORT_S", 0.05)
    process = multiprocessing.get_context("fork").Process(target=prepare_slowly)
    process.start()
    wait_until((out / "preparing.json").exists)
    handler = SetFlag()
    logging.getLogger("stocache").addHandler(handler)  # which the first line about waiting calls
    try:
        code, [line] = run(photos, out, "--on-error", on_error)
    finally:
        logging.getLogger("stocache").removeHandler(handler)
    process.join(20)
    assert process.exitcode == 0
    assert f"waiting for {out}, which is being prepared by process {process.pid} (" in caplog.text
    process.close()
    assert code == (0 if on_error == "skip" else 1)
    assert (
        ": 9 samples in 5 blocks of 2" if on_error == "skip" else "lacks 1 of 10 samples, which could not be loaded"
    ) in line
