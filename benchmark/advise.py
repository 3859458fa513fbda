"""What `stocache.advise` chooses, beside measured epochs: 36 settings of limit, workers, codec and batch size.

python -m benchmark advise [--folder PHOTOS]              # decoded photographs; generated ones without a folder
python -m benchmark advise --step-ms 10                   # with a training step that leaves the CPU free
python -m benchmark advise --load-ms 5                    # samples that wait 5 ms for a server, in place of photographs

In each round `advise` measures anew, and then each setting runs, every other round backwards. Its cache is filled
before. It has a loader whose workers are kept, one epoch that is not counted, and then epochs for at least
half a second; the median of these is the time of the setting in the round. What ran while other programs took more than a tenth
of a CPU runs again, `advise` too. *Measured* are medians over the rounds.

The setting that `advise` recommends runs in each round as the others do. *Chosen to best* is its time to the least of all.
torch has one thread, as it has in a worker.
"""

import argparse
import dataclasses
import functools
import gc
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from tqdm import tqdm

import stocache
from benchmark.filling import Photos
from benchmark.support.measuring import machine, settle, undisturbed
from stocache import CachedDataset, DataLoader
from stocache.loader.choice.measure import Setting
from stocache.system.limits import GIB, MIB
from stocache.tools.advise import Advice
from stocache.tools.bench import find_jpegs, photo_folder

CLAIM = "What advise chooses is within 5 % of the best of 36 settings."
NEEDS = (("PIL", '-e ".[bench]"'), ("lz4", '-e ".[bench]"'), ("zstandard", '-e ".[bench]"'))

WORKERS = 0, 1, 2, 4
GROUPS = (  # codec, batch size, and limits as shares of the bytes of all samples without a codec
    (None, 32, (0.0, 0.5, 1.1)),
    ("lz4", 32, (0.25, 0.5, 1.1)),
    ("zstd", 128, (0.25, 0.5, 1.1)),
)
MEASURED_S = 0.5


class Waiting(Dataset[Any]):
    """Samples that wait, as for a server: half of them for half as long, the others for one and a half times as long."""

    def __init__(self, samples: int, load_s: float) -> None:
        self.samples, self.load_s = samples, load_s
        self.data = torch.randint(0, 256, (97, 3, 128, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, idx: int) -> Any:
        time.sleep(self.load_s * (0.5 + idx % 2))
        return self.data[idx % 97].clone(), idx


def all_settings(sample_bytes: int, samples: int) -> list[Setting]:
    """Return the 36 settings."""
    whole = sample_bytes * samples
    return [
        Setting(workers, size, int(share * whole), codec)
        for codec, size, shares in GROUPS
        for share in shares
        for workers in WORKERS
    ]


def measure_epochs(cached: CachedDataset, setting: Setting, step_s: float) -> float:
    """Return the median seconds of an epoch."""
    loader = DataLoader(
        cached,
        batch_size=setting.batch_size,
        shuffle=True,
        num_workers=setting.workers,
        persistent_workers=setting.workers > 0,
        worker_method=setting.method,
    )

    run_epoch(loader, step_s)
    found = undisturbed(functools.partial(run_epochs, loader, step_s))
    del loader
    gc.collect()
    return found


def run_epochs(loader: Any, step_s: float) -> float:
    """Return the median seconds of several epochs."""
    seconds: list[float] = []
    while sum(seconds) < MEASURED_S:
        seconds.append(run_epoch(loader, step_s))
    return statistics.median(seconds)


def run_epoch(loader: Any, step_s: float) -> float:
    """Return the seconds of an epoch."""
    began = time.perf_counter()
    for _ in loader:
        if step_s:
            time.sleep(step_s)
    return time.perf_counter() - began


def open_cache(dataset: Any, setting: Setting) -> CachedDataset:
    """Return the dataset in a cache that is filled."""
    codec: Any = setting.codec
    cached = CachedDataset(dataset, f"{setting.limit_bytes}B", codec=codec)
    if setting.limit_bytes:
        cached.warm(progress=False, num_workers=2)
    return cached


def run_round(dataset: Any, settings: Sequence[Setting], backwards: bool, step_ms: float, bar: Any) -> dict[Setting, float]:
    """Return the seconds of an epoch of each setting. Settings that differ in workers only share a cache."""
    found: dict[Setting, float] = {}
    order = list(reversed(settings)) if backwards else list(settings)
    while order:
        first = order[0]
        alike = [each for each in order if dataclasses.replace(each, workers=first.workers) == first]
        settle(512 * MIB)
        with open_cache(dataset, first) as cached:
            for setting in alike:
                found[setting] = measure_epochs(cached, setting, step_of(step_ms, setting))
                bar.update()
        order = [each for each in order if each not in alike]
    return found


def step_of(step_ms: float, setting: Setting) -> float:
    """Return the seconds of a step; ``step_ms`` is for 32 samples."""
    return step_ms / 1000 * setting.batch_size / 32


def main() -> None:
    """Print the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="of photographs; by default they are generated")
    parser.add_argument("--photos", type=int, default=640, help="samples; each photograph is used several times")
    parser.add_argument("--load-ms", type=float, help="samples that wait so long, in place of photographs")
    parser.add_argument("--step-ms", type=float, default=0.0, help="of a training step for 32 samples")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"{machine()}\n")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than CPUs, which is wanted
    dataset: Any
    if options.load_ms is not None:
        dataset = Waiting(options.photos, options.load_ms / 1000)
    else:
        paths = find_jpegs(options.folder or photo_folder(min(options.photos, 400)))
        dataset = Photos((paths * -(-options.photos // len(paths)))[: options.photos])
    sample = dataset[0]
    measured: dict[Setting, list[float]] = {setting: [] for setting in all_settings(sample[0].nbytes + 8, len(dataset))}
    chosen: list[float] = []
    choices: list[Advice] = []
    with tqdm(total=options.rounds * (len(measured) + 1), unit="setting", smoothing=0) as bar:
        for number in range(options.rounds):
            bar.set_description("advise")
            settle(1024 * MIB)
            advice = undisturbed(
                lambda: stocache.advise(dataset, step_ms=options.step_ms, batch_size=(32, 128), progress=False), tries=3
            )
            choices.append(advice)
            bar.set_description(f"round {number + 1}")
            found = run_round(dataset, list(measured), bool(number % 2), options.step_ms, bar)
            for setting, seconds in found.items():
                measured[setting].append(seconds)
            best = advice.best.setting
            with open_cache(dataset, best) as cached:
                chosen.append(measure_epochs(cached, best, step_of(options.step_ms, best)))
            bar.update()
    show(measured, choices, chosen)


def show(measured: dict[Setting, list[float]], choices: Sequence[Advice], chosen: Sequence[float]) -> None:
    """Print the tables."""
    print("| limit, GiB | codec | batch | workers | measured, s | spread |")
    print("| --- | --- | --- | --- | --- | --- |")
    middle_s = {setting: statistics.median(seconds) for setting, seconds in measured.items()}
    for setting, seconds in measured.items():
        spread = (max(seconds) - min(seconds)) / middle_s[setting]
        cells = [
            f"{setting.limit_bytes / GIB:.3f}", setting.codec or "-", setting.batch_size, setting.workers,
            f"{middle_s[setting]:.4f}", f"{spread:.0%}",
        ]  # fmt: skip
        print(f"| {' | '.join(map(str, cells))} |")
    least = min(middle_s, key=middle_s.__getitem__)
    ratio = statistics.median(chosen) / middle_s[least]
    took = statistics.median(advice.took_s for advice in choices)
    print(f"\nchosen to best: {ratio:.3f} (at most 1.05); the best: {least}; advise took {took:.0f} s, and chose")
    for advice in choices:
        print(f"  {advice.best.code}")


if __name__ == "__main__":
    main()
