"""Tables: a workload's rows, and two result files side by side (``python -m bench compare A B``)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from .results import Results, Row, quantiles

REFERENCE = "torch fused"  # that the others' times are given as multiples of


def console() -> Console:
    """Where to print; wide enough for a table where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 150)


def table(rows: Sequence[Row]) -> Table:
    """Rows of one workload, rule and gradient dtype."""
    first = rows[0]
    reference = next((row.median for row in rows if row.contender == REFERENCE), None)
    title = f"{first.workload}: {first.rule}, {first.grads} gradients, {first.tensors:,} tensors, "
    title += f"{first.parameters:,} parameters (speed: {REFERENCE} is 1)"
    result = Table(title=title, box=SIMPLE)
    on_device = any(row.launches is not None for row in rows)
    result.add_column("contender", no_wrap=True)
    for name in ["ms", "p20 to p80", "speed", *(["host ms", "launches", "copies", "syncs"] * on_device), "operators"]:
        result.add_column(name, justify="right")
    for name in ["bytes/param", "GB/s", "of a copy", "peak MB"]:
        result.add_column(name, justify="right")
    for row in rows:
        if row.wrong is not None:
            result.add_row(row.contender, "wrong")
            continue
        ratio = None if reference is None or row.median is None else reference / row.median
        cells = [_ms(row.median), f"{_ms(row.p20)} to {_ms(row.p80)}", _number(ratio, 2)]
        cells += [_ms(row.host_median), *map(_number, (row.launches, row.copies, row.syncs))] * on_device
        cells += [_number(row.operators), _number(row.bytes_per_parameter)]
        cells += [_number(row.bandwidth and row.bandwidth / 1e9, 1), "-" if row.share is None else f"{row.share:.0%}"]
        result.add_row(row.contender, *cells, _number((row.peak_bytes or 0) / 1e6, 1))
    return result


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


# Two result files.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``compare`` takes."""
    parser.add_argument("before", type=Path, metavar="A", help="results.json, or its folder")
    parser.add_argument("after", type=Path, metavar="B", help="results.json, or its folder")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print both side by side."""
    out = console()
    before, after = Results.load(args.before), Results.load(args.after)
    for key in before.of:
        if before.of[key] != after.of.get(key):
            out.print(f"{key}: {before.of[key]} -> {after.of.get(key)}")
    out.print(compare(before.rows, after.rows))


def compare(before: Sequence[Row], after: Sequence[Row]) -> Table:
    """The change of every median, marked where it is beyond the spread; and what is gone, wrong or new."""
    result = Table("workload", "rule, gradients", "contender", "before ms", "after ms", "change", "")
    of_key = {row.key: row for row in after}
    for old in before:
        new = of_key.get(old.key)
        what = (old.workload, f"{old.rule}, {old.grads}", old.contender)
        if new is None or old.median is None or new.median is None:
            lost = "gone" if new is None else f"wrong: {new.wrong}" if new.wrong else "not measured in both"
            result.add_row(*what, _ms(old.median), _ms(new.median if new else None), "", lost)
            continue
        change = f"{new.median / old.median - 1:+.1%}"
        result.add_row(*what, _ms(old.median), _ms(new.median), change, verdict(old, new))
    for new in after:
        if new.key not in {old.key for old in before}:
            result.add_row(new.workload, f"{new.rule}, {new.grads}", new.contender, "-", _ms(new.median), "", "new")
    return result


def verdict(old: Row, new: Row) -> str:
    """``"faster"`` or ``"slower"`` where the spans from the 20th to the 80th percentile have nothing in common."""
    old_span, new_span = (quantiles(row.samples)[1:] for row in (old, new))
    if new_span[1] < old_span[0]:
        return "faster"
    return "slower" if new_span[0] > old_span[1] else "within the spread"
