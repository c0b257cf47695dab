"""Plots of results: time by workload, time against size, share of the bandwidth of a copy."""

from __future__ import annotations

import re
from collections.abc import Sequence

from matplotlib.figure import Figure

from .report import REFERENCE
from .results import Results, Row


def draw(results: Results) -> None:
    """Write what there is to see into the results' folder; one set of plots for each rule and gradient dtype."""
    for rule, grads in dict.fromkeys((row.rule, row.grads) for row in results.rows):
        rows = [row for row in results.rows if (row.rule, row.grads) == (rule, grads) and row.median is not None]
        sizes = [row for row in rows if re.fullmatch(r"size-\d+", row.workload)]
        models = [row for row in rows if row not in sizes]
        name, title = f"{rule}-{grads}".lower(), f"{rule}, {grads} gradients, {_where(results)}"
        if models:
            _save(results, f"time-{name}.png", _bars(models, title))
            _save(results, f"share-{name}.png", _shares(models, title))
        if sizes:
            _save(results, f"size-{name}.png", _sizes(sizes, title))


def _where(results: Results) -> str:
    of = results.of
    return str(of["gpu"]) if of["gpu"] else f"{of['cpu']}, {of['threads']} threads"


def _save(results: Results, name: str, figure: Figure) -> None:
    results.folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(results.folder / name, dpi=150)


def _bars(rows: Sequence[Row], title: str) -> Figure:
    """Time relative to torch's fused optimizer, lower is better, with the 20th to 80th percentile."""
    figure, spots, contenders, workloads = _grouped(rows, title)
    axes = figure.axes[0]
    for i, contender in enumerate(contenders):
        of_workload = {row.workload: row for row in rows if row.contender == contender}
        for at, workload in enumerate(workloads):
            row, unit = of_workload.get(workload), _unit(rows, workload)
            if row is None or row.median is None or row.p20 is None or row.p80 is None:
                continue
            spread = [[(row.median - row.p20) / unit], [(row.p80 - row.median) / unit]]
            label = contender if workload == next(iter(of_workload)) else None
            axes.bar(at + spots[i], row.median / unit, spots[-1], yerr=spread, color=f"C{i}", label=label)
    axes.set_ylabel(f"time of a step, {REFERENCE} = 1" if _has_reference(rows) else "time of a step (s)")
    axes.legend()
    return figure


def _has_reference(rows: Sequence[Row]) -> bool:
    workloads = {row.workload for row in rows}
    return workloads == {row.workload for row in rows if row.contender == REFERENCE}


def _unit(rows: Sequence[Row], workload: str) -> float:
    if not _has_reference(rows):
        return 1.0
    return next(row.median or 1.0 for row in rows if (row.workload, row.contender) == (workload, REFERENCE))


def _shares(rows: Sequence[Row], title: str) -> Figure:
    """Bandwidth relative to a copy's, with the copy as a line."""
    figure, spots, contenders, workloads = _grouped(rows, title)
    axes = figure.axes[0]
    for i, contender in enumerate(contenders):
        found = [row for row in rows if row.contender == contender and row.share is not None]
        at = [workloads.index(row.workload) + spots[i] for row in found]
        axes.bar(at, [row.share or 0.0 for row in found], spots[-1], color=f"C{i}", label=contender)
    axes.axhline(1.0, color="black", linewidth=1, label="copy of a large buffer")
    axes.set_ylabel("bytes moved (by formula) per second, over a copy's")
    axes.legend()
    return figure


def _grouped(rows: Sequence[Row], title: str) -> tuple[Figure, list[float], list[str], list[str]]:
    """A figure for bars; their places around a workload's and, last, their width; contenders and workloads."""
    contenders = list(dict.fromkeys(row.contender for row in rows))
    workloads = list(dict.fromkeys(row.workload for row in rows))
    width = 0.8 / len(contenders)
    figure = Figure(figsize=(2 + 1.6 * len(workloads), 5), layout="constrained")
    axes = figure.subplots()
    axes.set_xticks(range(len(workloads)), workloads, rotation=20)
    axes.set_title(title, fontsize="medium")
    return (
        figure,
        [width * (i - (len(contenders) - 1) / 2) for i in range(len(contenders))] + [width],
        contenders,
        workloads,
    )


def _sizes(rows: Sequence[Row], title: str) -> Figure:
    """Time against size on logarithmic scales, with a line for time in proportion to size."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots()
    for contender in dict.fromkeys(row.contender for row in rows):
        found = sorted((row.parameters, row.median or 0.0) for row in rows if row.contender == contender)
        axes.plot(*zip(*found, strict=True), marker="o", label=contender)
    smallest, largest = min(row.parameters for row in rows), max(row.parameters for row in rows)
    fastest = min(row.median or 0.0 for row in rows if row.parameters == largest)
    guide = [fastest * smallest / largest, fastest]
    axes.plot([smallest, largest], guide, color="grey", linestyle=":", label="in proportion to size")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("parameters")
    axes.set_ylabel("time of a step (s)")
    axes.set_title(title, fontsize="medium")
    axes.legend()
    return figure
