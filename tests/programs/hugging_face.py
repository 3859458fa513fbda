"""Hugging Face: images of varying size with ``set_transform``, which draws random crops; and ``Trainer`` on tokens of texts."""

import datasets
import numpy as np
import torch
from PIL import Image
from transformers import DataCollatorWithPadding, PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments, set_seed

from tests.programs.running import epochs
from tests.support.lookalikes import training

CROP = training(24)


def transform(batch):
    return {"pixel_values": [CROP(image.convert("RGB")) for image in batch["image"]], "label": batch["label"]}


def images():
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (40 + number, 50, 3), dtype=np.uint8)) for number in range(48)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    return datasets.Dataset.from_dict({"image": images, "label": list(range(48))}, features=features)


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.classes = torch.nn.Embedding(12, 8), torch.nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask, labels):
        mask = attention_mask[..., None]
        logits = self.classes((self.words(input_ids) * mask).sum(1) / mask.sum(1))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Losses(TrainerCallback):
    """Keeps what the trainer logs."""

    def __init__(self):
        self.logged = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logged.append({key: value for key, value in logs.items() if "runtime" not in key and "per_second" not in key})


def train(wrap, folder, num_workers, start_method):
    """Fine-tune on rows of varying length, with an evaluation after each epoch; return losses, weights and predictions."""
    from tokenizers import Tokenizer, models

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"[PAD]": 0}, "[PAD]")), pad_token="[PAD]")
    rows = [{"text": "x " * (1 + idx % 7), "label": idx % 2} for idx in range(60)]
    dataset = datasets.Dataset.from_list(rows).train_test_split(test_size=0.2, seed=0)

    def tokenize(examples):
        tokens = [[1 + (at + len(text)) % 11 for at in range(len(text))] for text in examples["text"]]
        return {"input_ids": tokens, "attention_mask": [[1] * len(each) for each in tokens]}

    dataset = dataset.map(tokenize, batched=True, remove_columns="text")
    model, losses, test = Classifier(), Losses(), wrap(dataset["test"])
    fixed = {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True, "logging_steps": 1}
    workers = {
        "dataloader_num_workers": num_workers,
        "dataloader_multiprocessing_context": start_method if num_workers else None,
    }
    arguments = TrainingArguments(output_dir=folder / "out", num_train_epochs=3, eval_strategy="epoch", **fixed, **workers)
    collate, train_dataset = DataCollatorWithPadding(tokenizer), wrap(dataset["train"])
    trainer = Trainer(model, arguments, collate, train_dataset, test, callbacks=[losses])
    trainer.train()
    predictions = trainer.predict(test)
    return losses.logged, dict(model.state_dict()), predictions.predictions, predictions.label_ids


def main(wrap, folder, trained=False, num_workers=0, start_method="fork", **options):
    """Train, or collect the batches of three epochs of images."""
    set_seed(0)
    datasets.disable_caching()
    if trained:
        return train(wrap, folder, num_workers, start_method)
    dataset = images()
    dataset.set_transform(transform)
    return epochs(wrap(dataset, **options), num_workers=num_workers, start_method=start_method)
