"""A tiny GPT-2 created from scratch, trained by transformers' Trainer. Prints losses and devices."""

import json
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Texts(torch.utils.data.Dataset):
    def __init__(self):
        self.tokens = torch.randint(64, (32, 16), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


class Losses(TrainerCallback):
    def __init__(self):
        self.losses = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.losses += [logs["loss"]] if "loss" in logs else []


def main(folder, use_cpu):
    torch.manual_seed(0)
    # Dropout would draw different values on each GPU.
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    arguments = TrainingArguments(
        folder, max_steps=4, per_device_train_batch_size=4, logging_steps=1, save_strategy="no",
        report_to=[], use_cpu=use_cpu, learning_rate=1e-2, disable_tqdm=True,
    )  # fmt: skip
    seen = Losses()
    trainer = Trainer(model, arguments, train_dataset=Texts(), callbacks=[seen])
    trainer.train()
    if arguments.process_index == 0:
        devices = sorted({str(p.device) for p in trainer.model.parameters()})
        print(json.dumps({"n_gpu": arguments.n_gpu, "devices": devices, "losses": seen.losses}))


if __name__ == "__main__":
    main(sys.argv[1], "cpu" in sys.argv)
