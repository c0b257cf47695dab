"""Train a small network in mixed precision twice, and compare: torch's three calls, then tritonamp's one.

Both runs start from the same weights and see the same batches of scikit-learn's bundled handwritten digits. The first
loss scale is too high on purpose, so that gradients overflow and steps are skipped until it has come down; growth is
frequent enough that it also goes up again. The runs must skip the same steps and end in the same place:

    python examples/digits.py
    python examples/digits.py --device cuda --optimizer sgd --plot sgd.png

The exit status is 0 when the runs agree, 1 when they do not.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import tritonamp

BATCH_SIZE = 64
MAX_NORM = 1.0
# float16 ends at 65504: this network's gradients bear a scale of 2**16 to 2**19, and 2**26 overflows at once.
INIT_SCALE = 2.0**26
GROWTH_INTERVAL = 80
# How far the losses of the last epoch may be apart: rounding differs, and bfloat16 rounds eight times as coarsely.
TOLERANCE = {torch.float16: 0.01, torch.bfloat16: 0.08, torch.float32: 0.01}
# Both optimizers of a pair take these options.
OPTIONS: dict[str, dict[str, Any]] = {"sgd": {"lr": 0.1, "momentum": 0.9}, "adam": {"lr": 4e-3}, "adamw": {"lr": 4e-3}}
TORCH = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
FUSED = {"sgd": tritonamp.SGD, "adam": tritonamp.Adam, "adamw": tritonamp.AdamW}


@dataclass(frozen=True)
class Settings:
    """What the command line says; ``dtype`` is autocast's."""

    device: torch.device
    dtype: torch.dtype
    optimizer: str
    epochs: int
    seed: int
    backend: str
    plot: str

    @property
    def scales_loss(self) -> bool:
        """Whether the dtype needs a loss scale: small gradients vanish in float16's range, not in the others'."""
        return self.dtype == torch.float16


@dataclass(frozen=True)
class Digits:
    """``[n, 64]`` float32 images in 0..1 and ``[n]`` int64 labels, on the training device."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass
class Run:
    """What one run left behind: a value per step, a test accuracy per epoch, the trained network.

    ``scale`` is the loss scale after the step; ``norm`` the gradient norm before clipping, inf or NaN where the step
    was skipped; ``seconds`` the time from the end of ``backward()`` to cleared gradients.
    """

    name: str
    model: nn.Module
    loss: list[float] = field(default_factory=list)
    scale: list[float] = field(default_factory=list)
    norm: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)


class Stepper(Protocol):
    """The part of a training loop that the two runs do differently."""

    optimizer: torch.optim.Optimizer

    def backward(self, loss: Tensor) -> None:
        """Compute scaled gradients."""

    def step(self) -> None:
        """Unscale, check, clip, update, adapt the loss scale, and clear the gradients."""

    def read(self) -> tuple[float, float, bool]:
        """Return the loss scale now, and the last step's gradient norm and whether it was skipped."""


class ThreeCalls:
    """torch's recipe: a gradient scaler, ``clip_grad_norm_`` and an optimizer."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.parameters = list(model.parameters())
        self.optimizer = TORCH[settings.optimizer](self.parameters, **OPTIONS[settings.optimizer])
        self.scaler = torch.amp.GradScaler(
            settings.device.type,
            init_scale=INIT_SCALE,
            growth_interval=GROWTH_INTERVAL,
            enabled=settings.scales_loss,
        )
        self.norm = torch.zeros(())

    def backward(self, loss: Tensor) -> None:
        """Scale the loss by hand, then call its own ``backward()``."""
        self.scaler.scale(loss).backward()

    def step(self) -> None:
        """Make the three calls, and those around them."""
        self.scaler.unscale_(self.optimizer)
        self.norm = nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def read(self) -> tuple[float, float, bool]:
        """Return scale, norm, and whether the norm says that the scaler has skipped, which it does not tell."""
        norm = self.norm.item()
        return self.scaler.get_scale(), norm, not math.isfinite(norm)


class OneCall:
    """tritonamp: one optimizer that does it all."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        loss_scale = tritonamp.LossScale(init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)
        self.optimizer = FUSED[settings.optimizer](
            model.parameters(),
            **OPTIONS[settings.optimizer],
            max_norm=MAX_NORM,
            loss_scale=loss_scale if settings.scales_loss else None,
            backend=settings.backend,
        )

    def backward(self, loss: Tensor) -> None:
        """Leave the loss scale to the optimizer."""
        self.optimizer.backward(loss)

    def step(self) -> None:
        """Make the one call."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def read(self) -> tuple[float, float, bool]:
        """Return what the optimizer has to tell."""
        loss_scale = self.optimizer.loss_scale
        scale = 1.0 if loss_scale is None else loss_scale.get_scale()
        return scale, self.optimizer.grad_norm.item(), self.optimizer.step_was_skipped


def load_data(settings: Settings) -> Digits:
    """Return the digits, three quarters of them for training."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=0.25, random_state=settings.seed, stratify=labels)
    train_x, test_x = (torch.tensor(part, dtype=torch.float32, device=settings.device) for part in parts[:2])
    train_y, test_y = (torch.tensor(part, device=settings.device) for part in parts[2:])
    return Digits(train_x, train_y, test_x, test_y)


def build_model(settings: Settings) -> nn.Module:
    """Return a network of two convolutions and two linear layers; the seed alone decides its weights.

    It is smooth: kinks, as those of ReLU and max-pooling, would tear runs apart that differ by a rounding error.
    """
    torch.manual_seed(settings.seed)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 128),
        nn.GELU(),
        nn.Linear(128, 10),
    ).to(settings.device)


def autocast(settings: Settings) -> torch.autocast:
    """Return the mixed-precision context of the forward pass, which does nothing for float32."""
    return torch.autocast(settings.device.type, settings.dtype, enabled=settings.dtype != torch.float32)


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle, so that the clock sees its work and not only its launch."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def train_step(run: Run, stepper: Stepper, x: Tensor, y: Tensor, settings: Settings) -> None:
    """Train on one batch and append what happened to ``run``."""
    with autocast(settings):
        loss = nn.functional.cross_entropy(run.model(x), y)
    stepper.backward(loss)
    synchronize(settings.device)
    start = time.perf_counter()
    stepper.step()
    synchronize(settings.device)
    run.seconds.append(time.perf_counter() - start)
    scale, norm, skipped = stepper.read()
    run.loss.append(loss.item())
    run.scale.append(scale)
    run.norm.append(norm)
    run.skipped.append(skipped)


def accuracy(model: nn.Module, data: Digits, settings: Settings) -> float:
    """Return the share of test images that the network names right."""
    with torch.no_grad(), autocast(settings):
        hits = model(data.test_x).argmax(1) == data.test_y
    return float(hits.float().mean())


def train(run: Run, stepper: Stepper, data: Digits, settings: Settings, progress: Progress) -> None:
    """Train for all epochs: the learning rate falls along a cosine, the order of the images follows the seed."""
    shuffle = torch.Generator().manual_seed(settings.seed)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(stepper.optimizer, settings.epochs)
    n = len(data.train_x)
    steps = n // BATCH_SIZE
    task = progress.add_task(run.name, total=settings.epochs * steps)
    for _ in range(settings.epochs):
        order = torch.randperm(n, generator=shuffle).to(settings.device)
        for batch in order[: steps * BATCH_SIZE].split(BATCH_SIZE):
            train_step(run, stepper, data.train_x[batch], data.train_y[batch], settings)
            progress.advance(task)
        schedule.step()
        run.accuracy.append(accuracy(run.model, data, settings))


def epoch_rows(run: Run) -> list[tuple[float, float, float, float, int, float]]:
    """Return for each epoch: mean loss, test accuracy, last scale, median norm, skipped steps, milliseconds."""
    rows = []
    steps = len(run.loss) // len(run.accuracy)
    for epoch, acc in enumerate(run.accuracy):
        part = slice(epoch * steps, (epoch + 1) * steps)
        norm = statistics.median([norm for norm in run.norm[part] if math.isfinite(norm)] or [math.nan])
        loss = statistics.fmean(run.loss[part])
        rows.append((loss, acc, run.scale[part][-1], norm, sum(run.skipped[part]), 1e3 * sum(run.seconds[part])))
    return rows


def epoch_table(runs: tuple[Run, Run]) -> Table:
    """Return a table with a line per epoch and run."""
    table = Table(title="Mean loss, test accuracy, last scale, median norm, skips, ms after backward")
    for column in ("epoch", "run", "loss", "accuracy", "scale", "norm", "skipped", "ms"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for epoch, pair in enumerate(zip(*map(epoch_rows, runs), strict=True), start=1):
        for run, (loss, acc, scale, norm, skipped, ms) in zip(runs, pair, strict=True):
            head = str(epoch) if run is runs[0] else ""
            values = (f"{loss:.4f}", f"{acc:.1%}", f"{scale:,.0f}", f"{norm:.3f}", str(skipped), f"{ms:.1f}")
            table.add_row(head, run.name, *values, end_section=run is runs[1])
    return table


def largest_difference(a: list[float], b: list[float]) -> float:
    """Return the largest absolute difference of two lists of equal length."""
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def summary_table(runs: tuple[Run, Run]) -> Table:
    """Return how far the runs are apart, and how long each takes after ``backward()``."""
    reference, ours = runs
    parameters = zip(reference.model.parameters(), ours.model.parameters(), strict=True)
    distance = max((p - q).abs().max().item() for p, q in parameters)
    times = [1e6 * statistics.median(run.seconds) for run in runs]
    table = Table(title="Both runs", show_header=False)
    table.add_row("largest difference of a step's loss", f"{largest_difference(reference.loss, ours.loss):.2e}")
    table.add_row("largest difference of a final parameter", f"{distance:.2e}")
    table.add_row("skipped steps", ", ".join(str(sum(run.skipped)) for run in runs))
    table.add_row("skipped at the same steps", "yes" if reference.skipped == ours.skipped else "no")
    for run, micros in zip(runs, times, strict=True):
        table.add_row(f"median time after backward(), {run.name}", f"{micros:.0f} µs")
    table.add_row("ratio", f"{times[0] / times[1]:.2f}")
    return table


def disagreements(runs: tuple[Run, Run], settings: Settings) -> list[str]:
    """Return what speaks against the two runs being the same training, one sentence each."""
    reference, ours = runs
    found = [
        f"{run.name} reached {run.accuracy[-1]:.1%} test accuracy, 95 % were expected"
        for run in runs
        if run.accuracy[-1] <= 0.95
    ]
    if settings.scales_loss:
        found += [f"{run.name} skipped no step" for run in runs if not any(run.skipped)]
    differing = [i for i, (a, b) in enumerate(zip(reference.skipped, ours.skipped, strict=True)) if a != b]
    if differing:
        found.append(f"one run skipped and the other did not at steps {differing}")
    losses = [epoch_rows(run)[-1][0] for run in runs]
    tolerance = TOLERANCE[settings.dtype]
    if not math.isclose(*losses, rel_tol=tolerance):
        found.append(f"the losses of the last epoch are over {tolerance:.0%} apart: {losses[0]:.6g}, {losses[1]:.6g}")
    return found


def plot(runs: tuple[Run, Run], path: str) -> None:
    """Draw loss, loss scale and gradient norm of every step to a PNG file."""
    figure = Figure(figsize=(9, 9), layout="constrained")
    axes = figure.subplots(3, sharex=True)
    styles = ({"color": "tab:blue", "linewidth": 4, "alpha": 0.35}, {"color": "tab:red", "linewidth": 1})
    for run, style in zip(runs, styles, strict=True):
        for axis, values in zip(axes, (run.loss, run.scale, run.norm), strict=True):
            axis.plot(values, label=run.name, **style)
    skipped = [step for step, skip in enumerate(runs[1].skipped) if skip]
    axes[1].plot(skipped, [runs[1].scale[step] for step in skipped], "kx", label="skipped step")
    axes[1].set_yscale("log", base=2)
    axes[0].set_yscale("log")
    axes[2].set_yscale("log")
    axes[2].axhline(MAX_NORM, color="gray", linestyle=":", label="max_norm")
    for axis, title in zip(axes, ("loss", "loss scale", "gradient norm before clipping"), strict=True):
        axis.set_ylabel(title)
        axis.legend(loc="upper right")
    axes[2].set_xlabel("step")
    figure.savefig(path, dpi=120)


def usable_device(name: str) -> torch.device:
    """Return the device of this name, or say why it cannot be used."""
    try:
        return torch.empty(0, device=name).device
    except (AssertionError, RuntimeError) as error:
        raise argparse.ArgumentTypeError(f"cannot use {name!r}: {str(error).splitlines()[0]}") from error


def parse_arguments(arguments: list[str] | None) -> Settings:
    """Read the command line; anything that cannot work ends the program with a message."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", type=usable_device, default="cpu", help="where to train (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=("float16", "bfloat16", "float32"), default="float16", help="autocast's dtype"
    )
    parser.add_argument("--optimizer", choices=tuple(TORCH), default="adamw")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=("auto", "triton", "torch"), default="auto", help="tritonamp's backend")
    parser.add_argument("--plot", default="digits.png", metavar="PATH", help="the plot's file (default: %(default)s)")
    options = vars(parser.parse_args(arguments))
    if options["epochs"] < 1:
        parser.error(f"--epochs must be at least 1, got {options['epochs']}")
    return Settings(**{**options, "dtype": getattr(torch, options["dtype"])})


def main(arguments: list[str] | None = None) -> int:
    """Run both, show and plot what happened, and return the exit status."""
    settings = parse_arguments(arguments)
    # The network is too small to share, and so the result does not depend on the number of cores.
    torch.set_num_threads(1)
    console = Console()
    data = load_data(settings)
    runs = (Run("torch", build_model(settings)), Run("tritonamp", build_model(settings)))
    steppers: tuple[Stepper, Stepper] = (ThreeCalls(runs[0].model, settings), OneCall(runs[1].model, settings))
    columns = (TextColumn("{task.description:>9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for run, stepper in zip(runs, steppers, strict=True):
            train(run, stepper, data, settings, progress)
    console.print(epoch_table(runs), summary_table(runs))
    plot(runs, settings.plot)
    console.print(f"Plot: {settings.plot}")
    problems = disagreements(runs, settings)
    for problem in problems:
        console.print(f"[bold red]The runs disagree:[/] {problem}.")
    if not problems:
        console.print("[bold green]The runs agree.[/]")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
