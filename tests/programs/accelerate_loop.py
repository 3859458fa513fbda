"""accelerate: a training loop over what ``prepare`` returns."""

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset

import stocache


class Points(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, idx):
        x = torch.randn(12, generator=torch.Generator().manual_seed(idx))
        return {"x": x, "y": x.sum().sin()}


def main(wrap, folder, num_workers=0, start_method="fork", seedable=False, ring=False):
    """Train for three epochs; return all losses, an evaluation and the weights."""
    set_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
    context = start_method if num_workers else None
    options = {"num_workers": num_workers, "persistent_workers": num_workers > 0, "multiprocessing_context": context}
    loader_class = stocache.DataLoader if ring else DataLoader
    train_loader = loader_class(wrap(Points(70)), batch_size=16, shuffle=True, **options)
    eval_loader = loader_class(wrap(Points(30)), batch_size=16, **options)
    model = torch.nn.Linear(12, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
    losses, predictions = [], []
    for _epoch in range(3):
        for batch in train_loader:
            loss = torch.nn.functional.mse_loss(model(batch["x"]).squeeze(1), batch["y"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append((batch, loss.detach()))
        with torch.no_grad():
            for batch in eval_loader:
                predictions.append(accelerator.gather_for_metrics((model(batch["x"]), batch["y"])))
    return losses, predictions, dict(accelerator.unwrap_model(model).state_dict())
