"""Handwritten digits with Hugging Face Accelerate: it accumulates and casts, tritonamp clips, checks and updates."""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset, random_split

import tritonamp

EPOCHS = 12


def main() -> int:
    """Train, print what happened, and return the exit status: 0 if the network has learned the digits."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # small as the network is, and the same result on any number of cores
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)

    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train_set, test_set = random_split(digits, [0.75, 0.25])
    loader = DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=512)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))

    optimizer = tritonamp.AdamW(model.parameters(), max_norm=1.0)
    steps = EPOCHS * -(-len(loader) // accelerator.gradient_accumulation_steps)
    scheduler = OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
    # Not accelerator.clip_grad_norm_(): max_norm does it, in the same launch.
    model, optimizer, loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, test_loader, scheduler
    )

    for epoch in range(EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        norm = optimizer.optimizer.grad_norm  # tritonamp's own optimizer, inside of Accelerate's
        accelerator.print(f"epoch {epoch:2}  loss {loss.item():.4f}  gradient norm {norm.item():.3f}")

    with torch.no_grad():
        hits = torch.cat([model(x).argmax(1) == y for x, y in test_loader])
    accuracy = accelerator.gather_for_metrics(hits).float().mean().item()
    accelerator.print(f"test accuracy {accuracy:.1%}")
    return 0 if accuracy > 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
