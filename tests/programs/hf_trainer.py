"""Hugging Face: a text dataset, tokenised with ``map``, and ``transformers.Trainer`` with a tiny BERT made here."""

import datasets
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from tests.programs.running import run

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "every", "cat", "sleeps"]


def make_tokenizer():
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    )


def make_texts(count):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 9, (count,), generator=generator).tolist()
    texts = [" ".join(WORDS[n] for n in torch.randint(len(WORDS), (length,), generator=generator)) for length in lengths]
    return {"text": texts, "label": [int("fox" in text) for text in texts], "idx": list(range(count))}


class Losses(TrainerCallback):
    """Keeps what the trainer logs."""

    def __init__(self):
        self.logged = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logged.append({key: value for key, value in logs.items() if "runtime" not in key and "per_second" not in key})


def train(wrap, folder, dataset, tokenizer, padding, **arguments):
    """Fine-tune, with evaluation after each epoch, and return losses, weights and predictions."""
    train_dataset, eval_dataset = wrap(dataset["train"]), wrap(dataset["test"])
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=2,
    )
    model = BertForSequenceClassification(config)
    losses = Losses()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder / "out",
            num_train_epochs=3,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=8,
            learning_rate=1e-3,
            logging_steps=1,
            eval_strategy="epoch",
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            seed=0,
            **arguments,
        ),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        data_collator=DataCollatorWithPadding(tokenizer) if padding == "longest" else default_data_collator,
        processing_class=tokenizer,
        callbacks=[losses],
    )
    trainer.train()
    predictions = trainer.predict(eval_dataset)
    return losses.logged, dict(model.state_dict()), predictions.predictions, predictions.label_ids


def read(wrap, dataset, num_workers):
    """Collect the batches of three epochs of tensors, as without a trainer."""
    dataset = wrap(dataset.with_format("torch", columns=["input_ids", "attention_mask", "label"]))
    loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=num_workers)
    return [list(loader) for epoch in range(3)]


def main(wrap, folder, padding="longest", with_format=None, trained=True, num_workers=0, start_method="fork", **arguments):
    """Train, or only read."""
    set_seed(0)
    datasets.disable_caching()
    tokenizer = make_tokenizer()
    dataset = datasets.Dataset.from_dict(make_texts(60)).train_test_split(test_size=0.2, seed=0)

    def tokenize(examples):
        return tokenizer(examples["text"], truncation=True, padding="max_length" if padding == "max" else False, max_length=12)

    dataset = dataset.map(tokenize, batched=True)
    if with_format:
        dataset = dataset.with_format(with_format)
    if not trained:
        return read(wrap, dataset["train"], num_workers)
    context = start_method if num_workers else None
    arguments |= {"dataloader_num_workers": num_workers, "dataloader_multiprocessing_context": context}
    return train(wrap, folder, dataset, tokenizer, padding, **arguments)


if __name__ == "__main__":
    run(main)
