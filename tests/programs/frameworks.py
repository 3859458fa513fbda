"""Frameworks that make the loader themselves, or take it over, from Lightning to Ultralytics."""

import os
import random

import numpy as np
import torch
import torch.utils.data
from torch import nn
from torch.nn import functional

from tests.programs.running import EPOCHS


class Points(torch.utils.data.Dataset):
    """Points and labels, as a dict or a pair."""

    def __init__(self, length, as_dict=False):
        self.length, self.as_dict = length, as_dict

    def __len__(self):
        return self.length

    def __getitem__(self, idx):
        point = torch.sin(torch.arange(8) * (idx + 1.0))
        return {"x": point, "labels": idx % 3} if self.as_dict else (point, idx % 3)


def loader_of(dataset, shuffle=True, **options):
    return torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=shuffle, num_workers=2, **options)


def sgd(layer):
    return torch.optim.SGD(layer.parameters(), 0.1)


def loss_of(layer, points, labels):
    return functional.cross_entropy(layer(points), labels)


def step(optimizer, loss, backward=torch.Tensor.backward):
    optimizer.zero_grad()
    backward(loss)
    optimizer.step()
    return loss.item()


def lightning(wrap, folder):
    from lightning import pytorch

    class Module(pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.losses = nn.Linear(8, 3), []

        def training_step(self, batch, number):
            loss = loss_of(self.layer, *batch)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, number):
            self.losses.append(loss_of(self.layer, *batch).item())

        def configure_optimizers(self):
            return sgd(self)

    module = Module()
    trainer = pytorch.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader_of(wrap(Points(64))), loader_of(wrap(Points(16)), shuffle=False))
    return module.losses, module.layer.weight.detach()


def accelerate(wrap, folder):
    from accelerate import Accelerator

    accelerator, layer = Accelerator(cpu=True), nn.Linear(8, 3)
    layer, optimizer, loader = accelerator.prepare(layer, sgd(layer), loader_of(wrap(Points(64))))
    return [step(optimizer, loss_of(layer, *batch), accelerator.backward) for _ in range(EPOCHS) for batch in loader]


def transformers(wrap, folder):
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, x, labels):
            scores = self.layer(x)
            return {"loss": functional.cross_entropy(scores, labels), "logits": scores}

    arguments = TrainingArguments(
        str(folder / "trainer"), num_train_epochs=EPOCHS, per_device_train_batch_size=8, report_to=[], use_cpu=True,
        save_strategy="no", dataloader_num_workers=2, logging_strategy="no", eval_strategy="epoch", disable_tqdm=True,
        remove_unused_columns=False,
    )  # fmt: skip
    model, (training, validation) = Model(), (wrap(Points(length, as_dict=True)) for length in (64, 16))
    trainer = Trainer(model, arguments, train_dataset=training, eval_dataset=validation)
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return losses, model.layer.weight.detach()


def ignite(wrap, folder):
    from ignite.engine import create_supervised_trainer

    layer = nn.Linear(8, 3)
    create_supervised_trainer(layer, sgd(layer), functional.cross_entropy).run(loader_of(wrap(Points(64))), max_epochs=EPOCHS)
    return layer.weight.detach()


def keras(wrap, folder):
    os.environ["KERAS_BACKEND"] = "torch"
    from keras import Sequential, layers

    model = Sequential([layers.Input((8,)), layers.Dense(3, activation="softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model.fit(loader_of(wrap(Points(64))), epochs=EPOCHS, verbose=0).history["loss"]


def torch_geometric(wrap, folder):
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

    graphs = [Data(x=torch.rand(8, 4), edge_index=torch.randint(8, (2, 12)), y=number % 3) for number in range(64)]
    loader, layer = DataLoader(wrap(graphs), 8, shuffle=True, num_workers=2), nn.Linear(4, 3)
    batches = (batch for _ in range(EPOCHS) for batch in loader)
    return [functional.cross_entropy(layer(batch.x)[batch.ptr[:-1]], batch.y).item() for batch in batches]


def losses_of(layer, training, validation):
    """Train for some epochs."""
    optimizer, losses = sgd(layer), []
    for _epoch in range(EPOCHS):
        losses += [step(optimizer, loss_of(layer, *batch)) for batch in training]
        losses += [loss_of(layer, *batch).item() for batch in validation]
    return losses


def make_images(folder):
    """Write a folder of images, as ImageFolder reads it."""
    from PIL import Image

    for number in range(48):
        path = folder / ("val" if number % 4 == 0 else "train") / f"class{number % 3}" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(number).integers(0, 255, (40, 48, 3), np.uint8)).save(path)


def torchvision(wrap, folder):
    from torchvision import datasets, transforms

    make_images(folder)
    last = transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)
    augmented = transforms.Compose([transforms.RandomResizedCrop(32), transforms.RandomHorizontalFlip(), *last])
    plain = transforms.Compose([transforms.Resize(36), transforms.CenterCrop(32), *last])
    training = loader_of(wrap(datasets.ImageFolder(folder / "train", augmented)))
    validation = loader_of(wrap(datasets.ImageFolder(folder / "val", plain)), shuffle=False)
    return losses_of(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 3)), training, validation)


def timm(wrap, folder):
    from timm import create_model
    from timm.data import create_dataset, create_loader

    make_images(folder)
    options = {"input_size": (3, 32, 32), "batch_size": 8, "num_workers": 2, "device": torch.device("cpu")}
    augment = {"is_training": True, "auto_augment": "rand-m6", "re_prob": 0.25, "interpolation": "random"}
    training, validation = (wrap(create_dataset("", folder, split=part, batch_size=8)) for part in ("train", "val"))
    loaders = create_loader(training, **augment, **options), create_loader(validation, is_training=False, **options)
    return losses_of(create_model("test_resnet", num_classes=3), *loaders)


def ultralytics(wrap, folder):
    from ultralytics.data.build import InfiniteDataLoader

    options = {"batch_size": 8, "num_workers": 2}
    training, validation = (InfiniteDataLoader(wrap(Points(length)), shuffle=length > 16, **options) for length in (64, 16))
    losses = losses_of(nn.Linear(8, 3), training, validation)
    training.reset()  # as it does when its last augmentations are switched off
    labels = [labels for _points, labels in training]
    training.close()  # else it kills its workers, and torch's memory stays in /dev/shm
    validation.close()
    return losses, labels


def steps(wrap, folder):
    """Train for a number of steps, whatever an epoch is, as gsplat's trainer does."""
    loader = loader_of(wrap(Points(64, as_dict=True)), persistent_workers=True)
    layer, batches, losses = nn.Linear(8, 3), iter(loader), []
    optimizer = sgd(layer)
    for _step in range(8 * EPOCHS):
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            batch = next(batches)
        losses.append(step(optimizer, loss_of(layer, batch["x"], batch["labels"])))
    return losses


FRAMEWORKS = {
    function.__name__: function
    for function in (lightning, accelerate, transformers, ignite, keras, torch_geometric, torchvision, timm, ultralytics)
} | {"torch.steps": steps}


def main(wrap, folder, of):
    random.seed(0)  # timm erases with it, in the main process, and Keras takes its seed of it
    torch.manual_seed(0)
    return FRAMEWORKS[of](wrap, folder)
