"""What `stocache.advise` chooses, beside measured epochs: 36 settings of limit, workers, codec and batch size.

In each round `advise` measures anew, and each setting runs, with a loader whose workers are kept, over a cache that is filled:
one epoch that is not counted, and then epochs for at least half a second, whose median is the time of the setting.
"""

import statistics
from functools import partial
from typing import Any

import torch

import stocache
from benchmark.support.datasets import photos
from benchmark.support.harness import Run, experiment
from benchmark.support.measuring import epoch_s
from stocache import CachedDataset, DataLoader
from stocache.loader.choice.measure import Setting
from stocache.system.limits import GIB

CLAIM = "What advise chooses is within 5 % of the best of 36 settings."

WORKERS = 0, 1, 2, 4
GROUPS: tuple[tuple[Any, int, tuple[float, ...]], ...] = (  # codec, batch size, and limits as shares of all samples' bytes
    (None, 32, (0.0, 0.5, 1.1)),
    ("lz4", 32, (0.25, 0.5, 1.1)),
    ("zstd", 128, (0.25, 0.5, 1.1)),
)


def epoch_of(dataset: Any, setting: Setting, at_least_s: float) -> float:
    """Return the median seconds of an epoch."""
    codec: Any = setting.codec
    with CachedDataset(dataset, f"{setting.limit_bytes}B", codec=codec) as cached:
        cached.warm(progress=False, num_workers=2)
        options = {"num_workers": setting.workers, "persistent_workers": setting.workers > 0, "worker_method": setting.method}
        loader = DataLoader(cached, setting.batch_size, shuffle=True, **options)
        epoch_s(loader)
        seconds = [epoch_s(loader)]
        while sum(seconds) < at_least_s:
            seconds.append(epoch_s(loader))
        del loader
    return statistics.median(seconds)


@experiment(rounds=3, needs="lz4 zstandard")
def settings(run: Run) -> None:
    """Seconds of an epoch over 640 photographs with each setting."""
    torch.set_num_threads(1)  # as in a worker
    dataset, at_least_s = photos(run.size(640, 64), run.photos(400)), run.size(0.5, 0.02)
    whole = (dataset[0][0].nbytes + 8) * len(dataset)
    tried = [
        Setting(workers, batch, int(share * whole), codec)
        for codec, batch, shares in GROUPS
        for share in shares
        for workers in run.size(WORKERS, (0,))
    ]
    chosen: list[Setting] = []

    def choose() -> float:
        advice = stocache.advise(dataset, batch_size=(32, 128), progress=False, time_limit_s=run.size(60.0, 5.0))
        print(f"{advice.best.code}, after {advice.took_s:.0f} s", flush=True)
        chosen.append(advice.best.setting)
        return epoch_of(dataset, chosen[-1], at_least_s)

    contenders = {str(number): partial(epoch_of, dataset, setting, at_least_s) for number, setting in enumerate(tried)}
    took = run.turns(contenders | {"chosen": choose}, warm_up=0)
    best = min(contenders, key=took.median)
    table = run.table("limit, GiB", "codec", "batch", "workers", "epoch, s", "to the best")
    for name, setting in zip(took, [*tried, chosen[-1]], strict=True):
        limit_gib = setting.limit_bytes / GIB
        table.row(limit_gib, setting.codec, setting.batch_size, setting.workers, took.median(name), took.spread(name, best))
    run.claim("what advise chooses takes 1.05 times the best setting", took.ratio("chosen", best), most=1.05)
