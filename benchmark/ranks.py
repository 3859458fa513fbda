"""One copy per machine without a name, for ranks that only said torchrun, mp.spawn, Lightning, accelerate, DeepSpeed or Ray."""

import base64
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmark.support.datasets import images
from benchmark.support.faults import trials
from benchmark.support.harness import Run, experiment, is_missing
from benchmark.support.processes import calling, fork, wait
from stocache import CachedDataset, SharedCache
from tests.support import launched

CLAIM = "Ranks of a job share one copy without a name, by each launcher, whatever is killed."

SAMPLES, DIMS = 512, (3, 32, 32)
LIBRARIES = "lightning", "accelerate", "deepspeed", "ray"
ROOT = Path(__file__).parents[1]


def in_mpi(log: str) -> None:
    """Be a rank that mpirun has started."""
    launched.read(int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"]), log)


def in_ray(log: str, ranks: int) -> None:
    """Let Ray start ranks."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=ranks + 1, include_dashboard=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            lambda: launched.read(int(os.environ["RANK"]), ranks, log),
            scaling_config=ScalingConfig(num_workers=ranks, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(storage_path=folder),
        ).fit()


def commands(ranks: int, port: int, log: str) -> dict[str, list[str]]:
    """Return the command of each launcher: of all ranks, or of each if they are started by hand."""
    program, programs, python = str(launched.__file__), Path(sys.executable).parent, sys.executable
    rank = [program, log, "0"]
    accelerate = [f"--num_processes={ranks}", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    accelerate += [f"--main_process_port={port}"]
    world = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(ranks))}).encode()).decode()
    deepspeed = [f"--world_info={world}", "--master_addr=127.0.0.1", f"--master_port={port}", "--no_local_rank"]
    return {
        "torchrun": [str(programs / "torchrun"), f"--nproc-per-node={ranks}", f"--master-port={port}", *rank],
        "spawn": [python, program, log, str(ranks)],
        "hand": [python, *rank],
        "lightning": [python, program, log, str(ranks), "lightning"],
        "accelerate": [str(programs / "accelerate"), "launch", "--multi_gpu", *accelerate, *rank],
        "deepspeed": [python, "-m", "deepspeed.launcher.launch", *deepspeed, *rank],
        "ray": calling(in_ray, log, ranks),
        "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks), *calling(in_mpi, log)],
    }


@experiment()
def launchers(run: Run) -> None:
    """2, 4 and 8 ranks by each launcher over 96 samples: reads, copies, and wrong samples."""
    table = run.table("launcher", "ranks", "reads", "copies", "wrong samples", "right")
    for launcher, command in run.chosen(commands(2, 0, "")).items():
        if shutil.which(command[0]) is None or (launcher in LIBRARIES and is_missing(launcher)):
            table.row(launcher, "not installed")
            continue
        for ranks in run.size((2, 4, 8), (2,)):
            with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
                port, log = random.randrange(20000, 30000), f"{folder}/reads"
                environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_TRAIN_V2_ENABLED": "1"}
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                started = [
                    subprocess.Popen(commands(ranks, port, log)[launcher], env=environment | of_rank, stdout=subprocess.DEVNULL)
                    for of_rank in ([numbers(rank, ranks) for rank in range(ranks)] if launcher == "hand" else [{}])
                ]
                assert all(process.wait(600) == 0 for process in started), launcher
                found = [json.loads(path.read_text()) for path in Path(folder).glob("reads-*")]
                reads = len(Path(log).read_text().split())
            copies, wrong = len({each["inode"] for each in found}), sum(each["wrong"] for each in found)
            right = len(found) == ranks and copies == 1 and not wrong and reads <= launched.N + 9 * ranks
            table.row(launcher, ranks, reads, copies, wrong, right)
    run.claim("ranks hold one copy, and read each sample once besides the probe", all(table.column("right")))


# ---------------------------------------------------------------------------------------------------- starts and kills


def numbers(rank: int, ranks: int) -> dict[str, str]:
    """Return the variables that say which rank a process is."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks), "WORLD_SIZE": str(ranks)}


def wrapping_ms(ranks: int, shared: bool) -> float:
    """Return the median ms that a rank takes to make a cache, all ranks at once."""

    def wrap(rank: int) -> None:
        os.environ |= numbers(rank, ranks)
        barrier.wait()
        began = time.perf_counter()
        data = SharedCache("100MB", SAMPLES, DIMS, share_ranks=shared, fingerprint="v1")
        queue.put(time.perf_counter() - began)
        barrier.wait()
        data.close()

    context = torch.multiprocessing.get_context("fork")
    queue, barrier = context.Queue(), context.Barrier(ranks)
    processes = [context.Process(target=wrap, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    found = sorted(1e3 * queue.get() for _ in processes)
    for process in processes:
        process.join()
    return float(found[ranks // 2])


@experiment(rounds=10)
def start(run: Run) -> None:
    """What finding each other adds to the time of making a cache."""
    table = run.table("ranks", "alone, ms", "sharing, ms", "added, ms")
    for ranks in (2, 4, 8):
        took = run.turns({"alone": partial(wrapping_ms, ranks, False), "sharing": partial(wrapping_ms, ranks, True)}, warm_up=0)
        alone, sharing = took.median("alone"), took.median("sharing")
        table.row(ranks, alone, sharing, sharing - alone)
    run.claim("finding each other adds 20 ms", max(table.column("added, ms")), most=20)


def check_all(rank: int, ranks: int) -> None:
    """Read samples in a random order, twice, as one of several ranks."""
    os.environ |= numbers(rank, ranks)
    photos, order = images(SAMPLES, DIMS), random.Random(rank)
    data: Any = CachedDataset(photos, "100MB", probe=2)
    for _ in range(2):
        for idx in order.sample(range(SAMPLES), SAMPLES):
            assert torch.equal(data[idx][0], photos[idx][0]), f"sample {idx} is wrong"


def kill(seed: int) -> Counter[str]:
    """Kill some of 2 to 4 ranks at a random moment; the others must end well."""
    rng = random.Random(seed)
    ranks = rng.choice([2, 3, 4])
    pids = [fork(partial(check_all, rank, ranks)) for rank in range(ranks)]
    time.sleep(rng.uniform(0, 0.6))
    for pid in rng.sample(pids, rng.randint(1, ranks)):
        os.kill(pid, signal.SIGKILL)
    statuses = [wait(pid) for pid in pids]
    assert {*statuses} <= {0, signal.SIGKILL}, "a rank failed"
    return Counter(killed=statuses.count(signal.SIGKILL))


@experiment(rounds=200, quick=5)
def kills(run: Run) -> None:
    """Kill ranks at random moments."""
    trials(run, {"2 to 4 ranks": kill})
