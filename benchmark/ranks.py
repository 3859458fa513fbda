"""One copy per machine without a name, for ranks that only said torchrun, mp.spawn, Lightning, accelerate, DeepSpeed or Ray.

python -m benchmark ranks launchers            # 2, 4 and 8 ranks by each launcher: reads, memory, weights, time to start
python -m benchmark ranks launchers --only torchrun,lightning --ranks 2
python -m benchmark ranks start                # what finding each other adds to the time of making a cache
python -m benchmark ranks kills --trials 200   # ranks killed at random moments: values, and what is left
"""

import argparse
import base64
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler

from stocache import CachedDataset, DataLoader, SharedCache

CLAIM = "Ranks of a job share one copy without a name, by each launcher, whatever is killed."

SAMPLES, DIMS, EPOCHS, BATCH = 512, (3, 32, 32), 3, 16
ROOT = Path(__file__).parents[1]
LAUNCHERS = ("torchrun", "spawn", "hand", "lightning", "accelerate", "deepspeed", "ray", "mpirun")


class Photos(Dataset[tuple[torch.Tensor, int]]):
    """Samples of random bytes, which note each read in a file."""

    def __init__(self, log: str) -> None:
        self.log = log

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, idx: int) -> tuple[torch.Tensor, int]:
        with open(self.log, "a") as file:
            file.write(f"{idx}\n")
        return torch.randint(0, 256, DIMS, dtype=torch.uint8, generator=torch.Generator().manual_seed(idx)), idx % 10


def data_of(folder: Path, cached: bool) -> tuple[Any, float]:
    """Return the dataset, cached if asked for, and the seconds that wrapping it took."""
    began = time.perf_counter()
    photos = Photos(str(folder / "reads"))
    data: Any = CachedDataset(photos, "100MB", audit=0.0) if cached else photos
    return data, time.perf_counter() - began


def write(folder: Path, rank: int, model: torch.nn.Module, data: Any, seconds: float) -> None:
    """Write what a rank has found: the hash of its weights, and what it shares."""
    digest = hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values()))
    found = {"weights": digest.hexdigest(), "seconds": seconds}
    if isinstance(data, CachedDataset):
        stats = data.stats()
        found |= {"ranks": stats.ranks, "reserved": stats.total.reserved_bytes, "filled": stats.total.filled}
        found["inode"] = os.fstat(data.cache._segment.fd).st_ino
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


def make_model() -> torch.nn.Module:
    """Return a small model with the same weights in each rank."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))


def train(folder: Path, cached: bool) -> None:
    """Train in this rank, which knows its number from the environment."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    data, seconds = data_of(folder, cached)
    model: Any = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, BATCH, sampler=sampler, num_workers=1)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images.float() / 255), labels).backward()
            optimizer.step()
        dist.barrier()
    write(folder, dist.get_rank(), model, data, seconds)
    dist.barrier()
    dist.destroy_process_group()


def train_with_lightning(folder: Path, cached: bool, ranks: int) -> None:
    """Make the dataset before Lightning starts the other ranks, as most programs do."""
    import lightning

    torch.set_num_threads(1)
    data, seconds = data_of(folder, cached)

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            images, labels = batch
            return torch.nn.functional.cross_entropy(self.model(images.float() / 255), labels)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

        def on_train_end(self) -> None:
            dist.barrier()
            write(folder, dist.get_rank(), self.model, data, seconds)

    loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True, num_workers=1)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(accelerator="cpu", devices=ranks, strategy="ddp", max_epochs=EPOCHS, **quiet)  # type: ignore[arg-type]
    trainer.fit(Model(), loader)


def _spawned(rank: int, ranks: int, folder: Path, cached: bool) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    train(folder, cached)


def _in_ray(folder: Path, cached: bool, ranks: int) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=ranks + 1, include_dashboard=False, logging_level="ERROR")
    TorchTrainer(
        lambda: train(folder, cached),
        scaling_config=ScalingConfig(num_workers=ranks, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(folder / "ray")),
    ).fit()


def command_of(launcher: str, ranks: int, port: int, arguments: list[str]) -> list[str]:
    """Return the command that starts the ranks."""
    program = [str(Path(__file__)), *arguments]
    python = [sys.executable, *program]
    bin_ = Path(sys.executable).parent
    if launcher == "torchrun":
        return [str(bin_ / "torchrun"), f"--nproc-per-node={ranks}", f"--master-port={port}", *program]
    if launcher == "accelerate":
        options = [f"--num_processes={ranks}", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
        return [str(bin_ / "accelerate"), "launch", "--multi_gpu", *options, f"--main_process_port={port}", *program]
    if launcher == "deepspeed":
        world = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(ranks))}).encode()).decode()
        options = [f"--world_info={world}", "--master_addr=127.0.0.1", f"--master_port={port}"]
        return [sys.executable, "-m", "deepspeed.launcher.launch", *options, *program]
    if launcher == "mpirun":
        return ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks), *python]
    return python


def run(launcher: str, ranks: int, cached: bool, timeout_s: float = 600) -> dict[str, Any]:
    """Train with ranks of a launcher; return what they have found."""
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    port = random.randrange(20000, 30000)
    arguments = ["--rank", str(folder), launcher, str(int(cached)), str(ranks)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"OMP_NUM_THREADS": "1", "RAY_TRAIN_V2_ENABLED": "1"}
    began = time.perf_counter()
    if launcher == "hand":
        started = [
            subprocess.Popen(
                [sys.executable, str(Path(__file__)), *arguments],
                env=environment | {"RANK": str(rank), "WORLD_SIZE": str(ranks)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for rank in range(ranks)
        ]
    else:
        command = command_of(launcher, ranks, port, arguments)
        started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)]
    outputs = [process.communicate(timeout=timeout_s)[0].decode(errors="replace") for process in started]
    seconds = time.perf_counter() - began
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    if len(found) != ranks or any(process.returncode for process in started):
        raise RuntimeError(f"{launcher}, {ranks} ranks:\n{outputs[0][-3000:]}")
    reads = len((folder / "reads").read_text().split())
    shutil.rmtree(folder)
    return {"found": found, "reads": reads, "seconds": seconds, "output": "".join(outputs)}


def launchers(only: list[str], counts: list[int]) -> None:
    """Print a row for each launcher and number of ranks."""
    print("| launcher | ranks | reads of 512 samples without; with | copies | weights equal | wrapping, s |")
    print("| --- | ---: | ---: | ---: | --- | ---: |")
    for launcher in only:
        for ranks in counts:
            plain, cached = run(launcher, ranks, False), run(launcher, ranks, True)
            found = cached["found"]
            equal = {each["weights"] for each in found} == {each["weights"] for each in plain["found"]}
            copies = len({each["inode"] for each in found})
            seconds = sorted(each["seconds"] for each in found)[len(found) // 2]
            row = f"{plain['reads']:,}; {cached['reads']:,} | {copies} | {'yes' if equal else 'NO'} | {seconds:.2f}"
            print(f"| {launcher} | {ranks} | {row} |", flush=True)


def start(counts: list[int], rounds: int) -> None:
    """Print how long a rank takes to wrap a dataset, all ranks at once, sharing and not."""
    print("| ranks | alone, ms | sharing, ms | added, ms |\n| ---: | ---: | ---: | ---: |")
    context = torch.multiprocessing.get_context("fork")
    for ranks in counts:
        took: dict[bool, list[float]] = {False: [], True: []}
        for shared in [False, True] * rounds:
            queue, barrier = context.Queue(), context.Barrier(ranks)
            arguments = [(rank, ranks, shared, barrier, queue) for rank in range(ranks)]
            processes = [context.Process(target=_wrap, args=each) for each in arguments]
            for process in processes:
                process.start()
            took[shared] += [1e3 * queue.get() for _ in processes]
            for process in processes:
                process.join()
        alone, sharing = (sorted(took[shared])[len(took[shared]) // 2] for shared in (False, True))
        print(f"| {ranks} | {alone:.1f} | {sharing:.1f} | {sharing - alone:.1f} |", flush=True)


def _wrap(rank: int, ranks: int, shared: bool, barrier: Any, queue: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks), "WORLD_SIZE": str(ranks)}
    barrier.wait()
    began = time.perf_counter()
    data = SharedCache("100MB", SAMPLES, DIMS, share_ranks=shared, fingerprint="v1")
    queue.put(time.perf_counter() - began)
    barrier.wait()
    data.close()


def kills(trials: int, seed: int) -> None:
    """Kill ranks of jobs at random moments; print what went wrong."""
    generator, before = random.Random(seed), set(os.listdir("/dev/shm"))
    wrong = hangs = killed = 0
    for _ in range(trials):
        folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        ranks = generator.choice([2, 3, 4])
        context = torch.multiprocessing.get_context("fork")
        processes = [context.Process(target=_check, args=(rank, ranks, str(folder))) for rank in range(ranks)]
        for process in processes:
            process.start()
        time.sleep(generator.uniform(0, 1.5))
        for process in generator.sample(processes, generator.randint(1, ranks)):
            os.kill(process.pid or 0, signal.SIGKILL)
            killed += 1
        for process in processes:
            process.join(60)
            hangs += process.exitcode is None
            wrong += process.exitcode not in (0, None, -signal.SIGKILL)
            process.kill()
        shutil.rmtree(folder)
    left = set(os.listdir("/dev/shm")) - before
    print(f"| {trials} | {killed} | {wrong} | {hangs} | {len(left)} |")


def _check(rank: int, ranks: int, folder: str) -> None:
    """Read samples in a random order as one of several ranks; end with an error if one is wrong."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    photos = Photos(f"{folder}/reads")
    data, order = CachedDataset(photos, "100MB", probe=2), random.Random(rank)
    for _ in range(2):
        for idx in order.sample(range(SAMPLES), SAMPLES):
            generator = torch.Generator().manual_seed(idx)
            if not torch.equal(data[idx][0], torch.randint(0, 256, DIMS, dtype=torch.uint8, generator=generator)):
                os._exit(3)
    os._exit(0)


def main() -> None:
    """Run a part of the benchmark; or one rank of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("launchers", "start", "kills"))
    parser.add_argument("--only", default=",".join(LAUNCHERS))
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # which DeepSpeed gives
    given, _ = parser.parse_known_args()
    if given.rank:
        _as_rank(Path(given.rank[0]), given.rank[1], given.rank[2] == "1", int(given.rank[3]))
    elif given.part == "start":
        start([int(text) for text in given.ranks.split(",")], 10)
    elif given.part == "kills":
        print("| trials | killed | wrong | hangs | left in /dev/shm |\n| ---: | ---: | ---: | ---: | ---: |")
        kills(given.trials, given.seed)
    else:
        launchers(given.only.split(","), [int(text) for text in given.ranks.split(",")])


def _as_rank(folder: Path, launcher: str, cached: bool, ranks: int) -> None:
    if launcher == "spawn":
        torch.multiprocessing.spawn(_spawned, (ranks, folder, cached), nprocs=ranks)
    elif launcher == "lightning":
        train_with_lightning(folder, cached, ranks)
    elif launcher == "ray":
        _in_ray(folder, cached, ranks)
    elif launcher == "mpirun":
        os.environ |= {"RANK": os.environ["OMPI_COMM_WORLD_RANK"], "WORLD_SIZE": os.environ["OMPI_COMM_WORLD_SIZE"]}
        train(folder, cached)
    else:
        train(folder, cached)


if __name__ == "__main__":
    main()
