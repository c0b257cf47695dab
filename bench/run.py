"""All that follows backward(), as torch does it and as we do: time, launches, waits, bytes and memory of a step.

Contenders are checked against a float64 oracle first, and timed in turns, in one process. Results go to a folder, as
JSON with every sample, CSV and plots, and are written as they are found.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from . import report
from .contenders import RULES, Contender, Rule, Step, choose
from .measure import COPIED_BYTES, WARMUP, Samples, count, in_turns
from .problem import Problem, bytes_per_element, check
from .results import Results, Row, circumstances, quantiles
from .workloads import WORKLOADS, Shape, numel, sweep, workload

GRADS = {"fp32": torch.float32, "fp16": torch.float16}
DEFAULT = ["resnet50", "gpt2", "small-400", "tiny-10000"]


class Match(NamedTuple):
    """One workload, rule and gradient dtype, and who competes."""

    name: str
    shapes: list[Shape]
    rule: Rule
    grads: str
    contenders: list[Contender]

    @property
    def bytes(self) -> int:
        """Memory that it takes: the problem, one gradient twice, every contender's state, one's temporaries."""
        n, grad_dtype = numel(self.shapes), GRADS[self.grads]
        states = 4 if self.rule.name == "SGD" else 8
        largest = max((numel([shape]) for shape in self.shapes), default=0)
        return n * (bytes_per_element(grad_dtype) + states * len(self.contenders) + 4) + 4 * largest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``run`` takes."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument(
        "--workloads",
        nargs="*",
        default=DEFAULT,
        metavar="NAME",
        help=f"size-N, or of {', '.join(WORKLOADS)} (default: {' '.join(DEFAULT)})",
    )
    parser.add_argument("--from-model", metavar="MODULE:CALLABLE", help="a callable that returns a torch.nn.Module")
    parser.add_argument("--sweep", type=float, metavar="N", help="also sizes from 1000 to N")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the first dimension of every tensor")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=["adamw"])
    parser.add_argument("--grads", nargs="+", choices=GRADS, default=["fp32"], help="dtypes of gradients")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help="who competes (default: all that can)")
    parser.add_argument("--rounds", type=int, default=20, help="how often each is timed")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder of the results")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Measure, print, write; the exit status is 1 if a contender was wrong."""
    console = report.console()
    if args.rounds < 1:
        raise SystemExit(f"--rounds must be at least 1, got {args.rounds}")
    try:
        matches = list(_matches(args, console))
    except ValueError as error:
        raise SystemExit(str(error)) from error
    device = torch.device(args.device)
    results = Results(args.out, circumstances(device))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    is_interrupted = False
    try:
        with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
            for match in matches:
                task = progress.add_task(match.name, total=len(match.contenders) + WARMUP + args.rounds)
                rows = play(match, device, args.rounds, partial(progress.advance, task))
                results.add(rows)
                console.print(report.table(rows))
                for row in rows:
                    if row.wrong is not None:
                        console.print(f"{row.contender} is wrong: {row.wrong}", markup=False)
    except KeyboardInterrupt:
        is_interrupted = True
    if results.rows:
        from . import plots  # slow to import

        plots.draw(results)
        console.print(f"results: {args.out}")
    if is_interrupted:
        sys.exit("interrupted")
    wrong = [row for row in results.rows if row.wrong is not None]
    if wrong:
        sys.exit(f"wrong, and not timed: {', '.join(f'{row.contender} ({row.workload})' for row in wrong)}")


def _matches(args: argparse.Namespace, console: Console) -> Iterator[Match]:
    """What is to be measured and can be; says what cannot."""
    names = [*args.workloads, *([args.from_model] if args.from_model else []), *sweep(int(args.sweep or 0))]
    for rule in (RULES[name] for name in args.rules):
        for grads in args.grads:
            contenders, reasons = choose(args.contenders, args.device, rule, grads == "fp16")
            console.print(*(f"{rule.name}, {grads}: no {reason}\n" for reason in reasons), sep="", end="")
            for name in names if contenders else ():
                match = Match(name, workload(name, args.scale), rule, grads, contenders)
                free = _free_bytes(args.device) - 2 * COPIED_BYTES[args.device]
                if match.bytes > free:
                    needs = f"{match.bytes / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"
                    console.print(f"{rule.name}, {grads}: no {name}: it needs {needs}; --scale shrinks it")
                else:
                    yield match


def _free_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/meminfo does not tell how much memory is free")


def play(match: Match, device: torch.device, rounds: int, tick: Callable[[], object] = lambda: None) -> list[Row]:
    """Check every contender, and time those that are right.

    Args:
        match: what is measured.
        device: where.
        rounds: how often each is timed.
        tick: called after every contender and every round, warm-up included.

    Returns:
        One row for each contender.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of the last workload's blocks, which fit no tensor of this one
    problem = Problem(match.shapes, device, GRADS[match.grads])
    rows: list[Row] = []
    steps: list[Step] = []
    for contender in match.contenders:
        row = Row(match.name, len(match.shapes), problem.numel, match.rule.name, match.grads, contender.name)
        try:
            step = contender.make(match.rule, problem.params)
            check(contender, step, problem)
        except Exception as error:  # noqa: BLE001 - whatever it raises, the others go on
            row = replace(row, wrong=f"{type(error).__name__}: {error}")
            problem.fill()
        else:
            moved = contender.bytes_per_parameter(match.rule, match.grads == "fp16")
            row = replace(row, bytes_per_parameter=moved, **asdict(count(problem, step)))
            steps.append(step)
        rows.append(row)
        tick()
    samples, copied, copied_bytes = in_turns(problem, steps, rounds, tick)
    of_steps = iter(samples)
    return [row if row.wrong else _timed(row, next(of_steps), copied, copied_bytes) for row in rows]


def _timed(row: Row, samples: Samples, copied: Samples, copied_bytes: int) -> Row:
    median, p20, p80 = quantiles(samples.total)
    return replace(
        row,
        median=median,
        p20=p20,
        p80=p80,
        host_median=quantiles(samples.host)[0] if samples.host else None,
        copy_seconds=quantiles(copied.total)[0],
        copy_bytes=copied_bytes,
        samples=samples.total,
        host_samples=samples.host,
        copy_samples=copied.total,
    )
