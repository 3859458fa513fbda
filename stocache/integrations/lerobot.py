"""LeRobot: each frame of a video is decoded once, for all windows, workers and ranks.

    frames = cache_frames(LeRobotDataset("lerobot/pusht", delta_timestamps=...), "16GiB")

Tried with lerobot 0.4.4 and 0.6.1.
"""

from typing import Any

import torch

from stocache.cache.keyed.cache import KeyedCache
from stocache.integrations import shared_by_ranks


def cache_frames(dataset: Any, size_limit_gib: float | str = "auto", **options: Any) -> "CachedFrames":
    """Have a dataset take its frames from a `KeyedCache`, whose arguments these are. ``close()`` of the result ends that.

    Ranks of a job share it. With a name or a disk, say by a ``fingerprint`` which version of the dataset it is.
    """
    root = dataset.root
    dataset = getattr(dataset, "reader", dataset)  # which decodes, from lerobot 0.6 on
    if not hasattr(dataset, "_query_videos"):
        raise TypeError(f"{type(dataset).__name__} has no _query_videos: it is not a LeRobotDataset that stocache knows.")
    cache = KeyedCache(size_limit_gib, **shared_by_ranks(options, f"frames of {root}"))
    dataset._query_videos = CachedFrames(dataset, cache)
    return dataset._query_videos  # type: ignore[no-any-return]


class CachedFrames:
    """Stands in for ``_query_videos`` of a dataset: the missing frames of a window are decoded in one call."""

    def __init__(self, dataset: Any, cache: KeyedCache[Any, Any]) -> None:
        self.dataset, self.cache = dataset, cache

    def __call__(self, query_timestamps: dict[str, list[float]], ep_idx: int) -> dict[str, torch.Tensor]:
        """Return the frames of each camera at some seconds, float32 of shape (T, C, H, W); (C, H, W) for one."""
        return {camera: self._window(camera, seconds, ep_idx) for camera, seconds in query_timestamps.items()}

    def _window(self, camera: str, seconds: list[float], ep_idx: int) -> torch.Tensor:
        def decode(missing: list[Any]) -> Any:
            wanted = [key[-1] for key in missing]
            frames = type(self.dataset)._query_videos(self.dataset, {camera: wanted}, ep_idx)[camera]
            return frames[None] if len(wanted) == 1 else frames

        keys = [(camera, int(ep_idx), float(second)) for second in seconds]
        frames = self.cache.get_or_load_many(keys, decode)
        return torch.stack(frames) if len(frames) != 1 else frames[0]

    def close(self) -> None:
        """Give the dataset its own method back, and release the memory."""
        vars(self.dataset).pop("_query_videos", None)
        self.cache.close()
