"""Lightning trains a small network on two devices. Arguments: the strategy and accelerator."""

import json
import sys

import lightning
import torch
from torch import nn


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.losses = []
        self.devices = set()

    def training_step(self, batch, i):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.losses.append(round(loss.item(), 6))
        self.devices |= {str(x.device), str(self.net[0].weight.device)}
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


def main(strategy, accelerator):
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(64, 8)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    module = Module()
    trainer = lightning.Trainer(
        accelerator=accelerator, devices=2, strategy=strategy, max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8))
    if trainer.is_global_zero:
        print(json.dumps({"devices": sorted(module.devices), "losses": module.losses}))


if __name__ == "__main__":
    main(*sys.argv[1:])
