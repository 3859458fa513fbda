"""torch's DataLoader, also where `use_everywhere` has put another one in its place."""

from typing import TYPE_CHECKING

from torch.utils.data import dataloader

if TYPE_CHECKING:
    from torch.utils.data.dataloader import DataLoader as TorchLoader
else:
    TorchLoader = vars(dataloader)["DataLoader"]

__all__ = ["TorchLoader"]
