"""StreamLoader: the demo of the article it comes from, its arguments, its length and its life."""

import itertools
import logging
import os
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from stocache import ClosedError, JsonLinesFormat, ReadOptions, StreamError, StreamLoader
from tests.support.texts import FORK, numbers

EMPLOYEES = """
-1 0.39 0 0 1 0.01 2; 1 0.59 1 0 0 0.02 0; -1 0.41 1 0 0 0.03 1; 1 0.50 0 1 0 0.04 1; 1 0.50 0 0 1 0.05 1
-1 0.36 1 0 0 0.06 1; 1 0.24 1 0 0 0.07 2; 1 0.27 0 1 0 0.08 2; 1 0.22 0 1 0 0.09 1; 1 0.63 0 1 0 0.10 0
1 0.34 1 0 0 0.11 1; -1 0.22 1 0 0 0.12 0; 1 0.35 0 0 1 0.13 2; -1 0.33 0 1 0 0.14 1; 1 0.45 0 1 0 0.15 1
1 0.42 0 1 0 0.16 1; -1 0.33 0 1 0 0.17 1; 1 0.25 0 0 1 0.18 1; -1 0.31 0 1 0 0.19 0; 1 0.27 1 0 0 0.20 2
1 0.48 1 0 0 0.21 1; -1 0.64 0 1 0 0.22 2; 1 0.61 0 1 0 0.23 0; 1 0.54 0 0 1 0.24 0; 1 0.29 1 0 0 0.25 0
1 0.50 0 0 1 0.26 1; 1 0.55 0 0 1 0.27 0; 1 0.40 1 0 0 0.28 0; 1 0.22 1 0 0 0.29 2; 1 0.68 0 1 0 0.30 0
-1 0.60 1 0 0 0.31 2; -1 0.34 0 0 1 0.32 1; -1 0.25 0 0 1 0.33 0; -1 0.31 0 1 0 0.34 1; 1 0.43 0 0 1 0.35 1
1 0.58 0 1 0 0.36 2; -1 0.55 0 1 0 0.37 2; -1 0.43 0 1 0 0.38 1; -1 0.21 1 0 0 0.39 0; -1 0.43 0 1 0 0.40 0
"""


@pytest.fixture
def employees(tmp_path):
    path = tmp_path / "employee_train_40.txt"
    path.write_text(EMPLOYEES.strip().replace("; ", "\n").replace(" ", "\t") + "\n")
    return path


# ---------------------------------------------------------------------------------------------------- the article


def test_the_demo_of_the_article_prints_its_items_in_order(employees, capsys, caplog):
    with StreamLoader(employees, 3, 12, shuffle=False) as loader:
        for epoch in range(4):
            print("\n == Epoch: " + str(epoch) + " ==")  # noqa: T201
            for b_idx, batch in enumerate(loader):
                print("epoch: " + str(epoch) + "   batch: " + str(b_idx))  # noqa: T201
                print(batch[0])  # noqa: T201
                print(batch[1])  # noqa: T201
        assert len(loader) == 12
    items = [[float(field) for field in line.split("\t")] for line in employees.read_text().splitlines()]
    wanted = ""
    for epoch in range(4):  # 36 items in three buffers; the last four fill none
        wanted += f"\n == Epoch: {epoch} ==\n"
        for b_idx in range(12):
            three = items[3 * b_idx : 3 * b_idx + 3]
            wanted += f"epoch: {epoch}   batch: {b_idx}\n{torch.tensor([item[:6] for item in three])}\n"
            wanted += f"{torch.tensor([int(item[6]) for item in three])}\n"
    assert capsys.readouterr().out == wanted
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "the last 4 of 40 rows do not fill a buffer of 12 and are left out of each epoch; drop_last='batch' leaves out only "
        "what does not fill a batch, drop_last=False nothing"
    ]


def test_shuffling_stays_inside_the_buffer_and_has_a_generator_of_its_own(employees):
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    with StreamLoader(employees, 3, 12, shuffle=True) as loader:
        epochs = [torch.cat([x[:, 5] for x, _ in loader]) for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    for epoch in epochs:
        for number, buffer in enumerate(epoch.split(12)):
            assert sorted(buffer.tolist()) == [torch.tensor(0.01 * n).item() for n in range(12 * number + 1, 12 * number + 13)]
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 3


# ---------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 3}, r"buffer_size=20 is not a multiple of batch_size=3\. Use for example 18"),
        ({"batch_size": 0}, "batch_size=0 is not an integer of at least 1"),
        ({"buffer_size": 2.5}, "buffer_size=2.5 is not an integer of at least 1"),
        ({"seed": -1}, "seed=-1 is not an integer of at least 0"),
        ({"num_workers": True}, "num_workers=True is not an integer"),
        ({"shuffle": "blocks"}, "shuffle='blocks' is unknown. Use False or True or 'buffers'"),
        ({"shuffle": 1}, "shuffle=1 is unknown"),
        ({"drop_last": "buffer"}, "drop_last='buffer' is unknown"),
        ({"delimiter": ","}, r"numbered\.tsv: no column is left .* 1 fields split at ','.*delimiter='\\t' would make 3"),
        ({"columns": [3]}, r"there is no column 3\. .*numbered\.tsv: the first row has 3 fields split at '\\t'"),
        ({"columns": ["a"]}, r"columns \['a', -1\] are named, but there is no header\. Pass skip_header=1"),
        ({"columns": ["a"], "skip_header": 1}, r"there is no column 'a'\. The header has \['0', '0', '0'\]"),
        ({"label_columns": 7}, "there is no column 7"),
        ({"format": JsonLinesFormat()}, r"numbered\.tsv: the first row is not a JSON object: '0\\t0\\t0'"),
    ],
)
def test_arguments_that_make_no_sense(numbered, options, message):
    with pytest.raises(StreamError, match=message):
        StreamLoader(numbered, **{"batch_size": 10, "buffer_size": 20, **options})


def test_pipes_and_arguments_at_the_edge(tmp_path, numbered):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StreamError, match="pipe is not a regular file, so it cannot be read twice"):
        StreamLoader(tmp_path / "pipe", 1, 1)
    for options, message in (
        ({"seed": 2**63}, "has more than 63 bits"),
        ({"label_columns": []}, "no column is left for the features, or the labels"),
        ({"columns": []}, "no column is left for the features, or the labels"),
    ):
        with pytest.raises(StreamError, match=message):
            StreamLoader(numbered, 10, 20, **options)
    with StreamLoader(numbered, 10, 20) as loader:
        for epoch in (-1, 1.5):
            with pytest.raises(StreamError, match="is not an integer of at least 0"):
                loader.set_epoch(epoch)


# ---------------------------------------------------------------------------------------------------- its length


def test_the_length_is_known_after_a_first_pass_or_when_counted(numbered):
    for drop_last, batches in ((True, 42), ("batch", 43), (False, 44)):
        with StreamLoader(numbered, 10, 20, drop_last=drop_last) as loader:
            with pytest.raises(TypeError, match="known after its first epoch, or with count_rows=True"):
                len(loader)
            assert bool(loader)
            assert len(list(loader)) == len(loader) == batches
        for options in ({"count_rows": True}, {"shuffle": "buffers"}):
            with StreamLoader(numbered, 10, 20, drop_last=drop_last, **options) as loader:
                assert len(loader) == batches
                assert len(list(loader)) == batches


def test_the_length_is_known_after_a_pass_of_workers(numbered):
    with StreamLoader(numbered, 10, 20, num_workers=2, read=FORK) as loader:
        assert len(list(loader)) == len(loader) == 42
        assert len(DataLoader(loader, batch_size=None)) == 42


# ---------------------------------------------------------------------------------------------------- life


def test_leaving_early_leaves_nothing(numbered):
    for ways in ({}, {"num_workers": 2, "read": FORK}):
        loader = StreamLoader(numbered, 10, 20, size_limit_gib=0.1, **ways)
        for _ in range(3):
            for _ in itertools.islice(loader, 5):
                pass
        assert len(numbers(loader)) == 420
        loader.close()
        loader.close()
        with pytest.raises(ClosedError, match="the StreamLoader is closed"):
            next(iter(loader))
        with pytest.raises(ClosedError, match="the StreamLoader is closed"):
            len(loader)


def test_it_is_copied_with_what_it_knows(numbered):
    with StreamLoader(numbered, 10, 20, size_limit_gib=0.1) as loader:
        assert len(numbers(loader)) == 420
        with pickle.loads(pickle.dumps(loader)) as copied:
            assert len(copied) == 42
            assert numbers(copied) == list(range(420))
            assert copied.stats().cache.hits == 21


def test_a_progress_bar(numbered, capsys):
    with StreamLoader(numbered, 10, 20, read=ReadOptions(progress=True), count_rows=True) as loader:
        list(loader)
    shown = capsys.readouterr().err
    assert "counting rows" in shown
    assert "epoch 0: " in shown
    assert "437" in shown
    with StreamLoader(numbered, 10, 20) as loader:
        list(loader)
    assert not capsys.readouterr().err
