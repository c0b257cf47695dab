"""Handwritten digits with Lightning, in float16: it scales the loss with our scaler, and tritonamp does the rest."""

from __future__ import annotations

import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.plugins import MixedPrecision
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset, random_split

import tritonamp


class Digits(lightning.LightningModule):
    """A network of two layers for images of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss."""
        x, y = batch
        return nn.functional.cross_entropy(self.layers(x), y)

    def test_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Log the accuracy."""
        x, y = batch
        self.log("accuracy", (self.layers(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> Any:
        """Return the optimizer, which clips too: no gradient_clip_val in the Trainer."""
        optimizer = tritonamp.AdamW(self.parameters(), max_norm=1.0)
        schedule = OneCycleLR(optimizer, max_lr=1e-2, total_steps=int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self, *_: Any) -> None:
        """Show what the step leaves to read."""
        optimizer: Any = self.optimizers()
        self.log("norm", optimizer.grad_norm, prog_bar=True)
        self.log("skipped", optimizer.skipped_steps.float(), prog_bar=True)


def main() -> int:
    """Train, print what happened, and return the exit status: 0 if the network has learned the digits."""
    lightning.seed_everything(0)
    torch.set_num_threads(1)  # small as the network is, and the same result on any number of cores
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train_set, test_set = random_split(digits, [0.75, 0.25])

    device = "cuda" if torch.cuda.is_available() else "cpu"
    # A first scale that overflows, to see steps skipped: the default is 2**16.
    scaler = tritonamp.GradScaler(device, init_scale=2.0**24)
    trainer = lightning.Trainer(
        accelerator=device,
        devices=1,
        max_epochs=8,
        plugins=MixedPrecision("16-mixed", device, scaler),
        logger=False,
        enable_checkpointing=False,
    )
    model = Digits()
    trainer.fit(model, DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True))
    (metrics,) = trainer.test(model, DataLoader(test_set, batch_size=512))
    optimizer: Any = trainer.optimizers[0]
    skipped = int(optimizer.skipped_steps)
    print(f"loss scale {scaler.get_scale():,.0f} after {skipped} skipped steps")
    return 0 if metrics["accuracy"] > 0.95 and skipped > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
