"""Train a small network in mixed precision, sharded by FSDP2 over the processes that torchrun starts.

    torchrun --nproc-per-node 2 examples/fsdp2_digits.py

It runs on GPUs with NCCL, or on CPUs with gloo where there are none. The optimizer is made as for one process. The
first loss scale is too high on purpose: a gradient that overflows in one process alone makes all of them skip the step
and lower their scales. The exit status is 0 when the network has learned the digits and all processes have done the
same, 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tritonamp

BATCH_SIZE = 64  # of all processes together
INIT_SCALE = 2.0**26  # overflows float16 at once


def join() -> torch.device:
    """Join the process group; returns this process's device."""
    has_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # the processes share the cores
    dist.init_process_group("nccl" if has_gpus else "gloo")
    return device


def load_data(device: torch.device) -> list[Tensor]:
    """Return training and test images, ``[n, 64]`` float32 in 0..1, then training and test labels, ``[n]`` int64."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=0.25, random_state=0, stratify=labels)
    images = [torch.tensor(part, dtype=torch.float32, device=device) for part in parts[:2]]
    return images + [torch.tensor(part, device=device) for part in parts[2:]]


def build_model(device: torch.device) -> nn.Module:
    """Return a network whose parameters are sharded, layer by layer, over all processes."""
    torch.manual_seed(0)  # the same weights everywhere
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10)).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, epochs: int) -> None:
    """Train; every process takes its own rows of each batch."""
    shuffle = torch.Generator().manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for _ in range(epochs):
        order = torch.randperm(len(x), generator=shuffle).to(x.device)
        for batch in order[: len(x) // BATCH_SIZE * BATCH_SIZE].split(BATCH_SIZE):
            rows = batch[rank::ranks]
            with torch.autocast(x.device.type, torch.float16):
                loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of images that the network names right."""
    with torch.no_grad(), torch.autocast(x.device.type, torch.float16):
        return float((model(x).argmax(1) == y).float().mean())


def main() -> int:
    """Train, compare what all processes have found, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    epochs: int = parser.parse_args().epochs
    device = join()
    train_x, test_x, train_y, test_y = load_data(device)
    model = build_model(device)
    loss_scale = tritonamp.LossScale(INIT_SCALE, growth_interval=100)
    optimizer = tritonamp.AdamW(model.parameters(), lr=4e-3, max_norm=1.0, loss_scale=loss_scale)
    train(model, optimizer, train_x, train_y, epochs)

    share = accuracy(model, test_x, test_y)
    found = (int(optimizer.skipped_steps), float(optimizer.grad_norm), loss_scale.state_dict(), share)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    problems = []
    if any(other != everyone[0] for other in everyone):
        problems.append(f"the processes differ: {everyone}")
    if found[0] == 0:
        problems.append("no step was skipped")
    if share <= 0.95:
        problems.append(f"{share:.1%} of the test images were named right, 95 % were expected")
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes on {device.type}: {share:.1%} of the test images named right,")
        print(f"{found[0]} steps skipped, the loss scale is {loss_scale.get_scale():,.0f}.")
        print("\n".join(f"Failed: {problem}." for problem in problems) or "All processes agree.")
    dist.destroy_process_group()
    return 1 if problems else 0


if __name__ == "__main__":
    status = main()
    # Not sys.exit(): torch 2.13's gloo threads abort an ordinary exit now and then, with any optimizer.
    sys.stdout.flush()
    os._exit(status)
