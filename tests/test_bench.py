"""The benchmark: it times the right thing, and prints no number of a wrong one."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_package  # noqa: F401 - makes bench importable
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench import contenders, measure, report, run, workloads
from bench.contenders import CONTENDERS, RULES, Contender, ScalerStep, Step
from bench.problem import Problem, check
from bench.results import Results, Row, quantiles
from tritonamp.backends import norm

pytestmark = pytest.mark.compiled  # one process is enough

CPU = torch.device("cpu")
ON_CPU = [c for c in CONTENDERS if "cpu" in c.devices and not c.is_optional]
SHAPES = [(64, 64), (7,), (1,), (3, 1000)]


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [
        ("resnet50", 161, 25_557_032),
        ("vit-b16", 152, 86_567_656),
        ("bert-large", 391, 335_141_888),
        ("gpt2", 148, 124_439_808),
        ("gpt2-xl", 580, 1_557_611_200),
        ("llama3.2-1b", 146, 1_235_814_400),
        ("llama3.1-8b-layer", 9, 218_112_000),
        ("tiny-10000", 10_000, 640_000),
        ("small-400", 400, 1_638_400),
        ("one-1b", 1, 1_000_000_000),
        ("size-3000000", 3, 3_000_000),
    ],
)
def test_workloads_have_the_published_parameter_counts(name: str, tensors: int, parameters: int) -> None:
    shapes = workloads.workload(name)
    assert (len(shapes), workloads.numel(shapes)) == (tensors, parameters)


def test_a_scale_shrinks_every_tensor_to_no_less_than_one_row() -> None:
    assert workloads.workload("llama3.1-8b-layer", 0.1)[:2] == [(410, 4096), (103, 4096)]
    assert all(shape[0] == 1 for shape in workloads.workload("resnet50", 1e-9))
    for scale in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match=f"got {scale}"):
            workloads.workload("gpt2", scale)


def test_a_workload_may_be_any_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_model.py").write_text("import torch\n\ndef build():\n    return torch.nn.Linear(5, 3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert workloads.workload("some_model:build") == [(3, 5), (3,)]
    with pytest.raises(ValueError, match="unknown workload 'gpt5'"):
        workloads.workload("gpt5")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("contender", "dtype"),
    [*((c, torch.float32) for c in ON_CPU), *((c, torch.float16) for c in ON_CPU if c.takes_fp16)],
    ids=str,
)
def test_every_contender_is_right(contender: Contender, rule: str, dtype: torch.dtype) -> None:
    problem = Problem(SHAPES, CPU, dtype)
    check(contender, contender.make(RULES[rule], problem.params), problem)


class Wrong(ScalerStep):
    """torch's three calls with a mistake."""

    mistake = ""

    def __call__(self) -> None:
        if self.mistake == "no clip":
            self._scaler.unscale_(self.optimizer)
            self._norm = torch.nn.utils.clip_grad_norm_(self._params, math.inf)
            self._scaler.step(self.optimizer)
            self._scaler.update()
        elif self.mistake == "no skip":
            for param in self._params:
                param.grad.nan_to_num_(posinf=0.0)
            super().__call__()
        elif self.mistake == "last tensor left out":
            before = self._params[-1].detach().clone()
            super().__call__()
            with torch.no_grad():
                self._params[-1].copy_(before)
        elif self.mistake == "scale stays":
            self._scaler.set_backoff_factor(0.999)
            super().__call__()
        elif self.mistake == "norm of a part":
            self._scaler.unscale_(self.optimizer)
            grads = [param.grad for param in self._params]
            self._norm = torch.nn.utils.get_total_norm(grads[:-1])
            torch.nn.utils.clip_grads_with_norm_(self._params, contenders.MAX_NORM, self._norm)
            self._scaler.step(self.optimizer)
            self._scaler.update()
        elif self.mistake == "float32 bias correction":
            before = [param.detach().clone() for param in self._params]
            super().__call__()
            with torch.no_grad():
                for param, old in zip(self._params, before, strict=True):
                    param.add_(param - old, alpha=3e-5)  # half a rounding of 1, over 1 - 0.999
        elif self.mistake == "wrong decay":
            self.optimizer.param_groups[0]["weight_decay"] *= 2
            super().__call__()
            self.optimizer.param_groups[0]["weight_decay"] /= 2
        else:
            super().__call__()


MISTAKES = ["no clip", "no skip", "last tensor left out", "scale stays", "norm of a part", "wrong decay"]


def wrong(mistake: str) -> Contender:
    def make(rule: contenders.Rule, params: Sequence[Tensor]) -> Step:
        step = Wrong(torch.optim.AdamW(params, fused=True, **rule.options), params)
        step.mistake = mistake
        return step

    return Contender("wrong", make)


def assert_judged(mistake: str, contender: Contender, problem: Problem) -> None:
    """It passes without a mistake, and does not with one."""
    step = contender.make(RULES["adamw"], problem.params)
    with pytest.raises(AssertionError) if mistake else contextlib.nullcontext():
        check(contender, step, problem)


@pytest.mark.parametrize("mistake", ["", *MISTAKES])
@pytest.mark.parametrize(
    "shapes", [SHAPES, [(70,)] * 250, [(50,), (5000,)]], ids=["all", "some tensors", "some elements"]
)
def test_a_mistake_is_found(mistake: str, shapes: list[tuple[int, ...]]) -> None:
    assert_judged(mistake, wrong(mistake), Problem(shapes, CPU))


@pytest.mark.parametrize("mistake", ["", "no skip", "last tensor left out", "scale stays", "norm of a part"])
def test_a_mistake_is_found_where_the_state_is_of_unknown_meaning(mistake: str) -> None:
    assert_judged(mistake, replace(wrong(mistake), module="another"), Problem(SHAPES, CPU))


def test_a_bias_correction_in_float32_is_let_through_only_where_it_is_known() -> None:
    problem, contender = Problem(SHAPES, CPU), wrong("float32 bias correction")
    check(replace(contender, is_double=False), contender.make(RULES["adamw"], problem.params), problem)
    with pytest.raises(AssertionError):
        check(contender, contender.make(RULES["adamw"], problem.params), problem)


class Recorder(Step):
    """Notes when it is called and with which gradients, and spoils these."""

    def __init__(self, name: str, problem: Problem, calls: list[Any]) -> None:
        self.name, self.problem, self.calls = name, problem, calls

    def scale_loss(self) -> None:
        self.calls.append(("scale", self.name))

    def __call__(self) -> None:
        grads = [param.grad for param in self.problem.params]
        is_pristine = all(map(torch.equal, grads, self.problem.pristine))
        is_shared = any(g.data_ptr() == p.data_ptr() for g, p in zip(grads, self.problem.pristine, strict=True))
        self.calls.append((self.name, is_pristine and not is_shared))
        for grad in grads:
            grad.div_(2)


def test_contenders_take_turns_and_each_step_finds_pristine_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measure.COPIED_BYTES, "cpu", 1 << 10)
    problem, calls = Problem(SHAPES, CPU), []
    steps = [Recorder(name, problem, calls) for name in "abc"]
    samples, copied, copied_bytes = measure.in_turns(problem, steps, rounds=4)
    assert copied_bytes == 1 << 11
    assert [len(taken.total) for taken in [*samples, copied]] == [4] * 4
    order = [name for kind, name in calls if kind == "scale"]
    assert "".join(order) == "abcbcacababcbcacab"
    assert [call for call in calls if call[0] != "scale"] == [(name, True) for name in order]


def test_a_wrong_contender_gets_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measure.COPIED_BYTES, "cpu", 1 << 20)
    right = next(c for c in CONTENDERS if c.name == "torch fused")
    monkeypatch.setattr(contenders, "CONTENDERS", [wrong("no clip"), right])
    with pytest.raises(SystemExit, match=r"wrong, and not timed: wrong \(size-2000\)"):
        run.run(arguments("--workloads", "size-2000", "--out", str(tmp_path)))
    bad, good = Results.load(tmp_path).rows
    assert "out of bounds" in str(bad.wrong) and bad.median is None and bad.samples == []
    assert good.wrong is None and len(good.samples) == 3 and good.p20 <= good.median <= good.p80


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    return parser.parse_args(["--device", "cpu", "--rounds", "3", *words])


def test_a_run_leaves_json_csv_and_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(measure.COPIED_BYTES, "cpu", 1 << 20)
    run.run(arguments("--workloads", "resnet50", "--scale", "1e-3", "--sweep", "1e4", "--out", str(tmp_path)))
    names = {"results.json", "results.csv", "time-adamw-fp32.png", "share-adamw-fp32.png", "size-adamw-fp32.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    of = json.loads((tmp_path / "results.json").read_text())["of"]
    assert of["torch"] == torch.__version__ and of["device"] == "cpu" and of["cpu"]
    rows = Results.load(tmp_path).rows
    assert {row.workload for row in rows} == {"resnet50", "size-1000", "size-10000"}
    assert {row.contender for row in rows} == {c.name for c in ON_CPU}
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 1 + len(rows)
    assert "no tritonamp triton: not on cpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rounds", "0"), "--rounds must be at least 1, got 0"),
        (("--workloads", "gpt5"), "unknown workload 'gpt5'"),
        (("--contenders", "lion"), "unknown contender 'lion'"),
        (("--scale", "2"), "scale must be above 0 and at most 1, got 2.0"),
    ],
)
def test_bad_arguments_are_named(words: Sequence[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        run.run(arguments(*words))


def test_what_does_not_fit_is_left_out_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "_free_bytes", lambda device: 1 << 30)
    run.run(arguments("--workloads", "one-1b", "--out", str(tmp_path)))
    assert "no one-1b: it needs" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def row(median: float, spread: float, workload: str = "gpt2", **values: Any) -> Row:
    samples = [median - spread, median, median + spread]
    times = dict(zip(("median", "p20", "p80"), quantiles(samples), strict=True))
    return Row(workload, 148, 1000, "AdamW", "fp32", "torch fused", samples=samples, **{**times, **values})


def test_quantiles_are_those_of_all_samples() -> None:
    assert quantiles([float(i) for i in range(11)][::-1]) == (5.0, 2.0, 8.0)
    assert quantiles([3.0]) == (3.0, 3.0, 3.0)


def test_a_difference_counts_where_the_spreads_are_apart() -> None:
    assert report.verdict(row(10.0, 1.0), row(12.0, 1.0)) == "slower"
    assert report.verdict(row(12.0, 1.0), row(10.0, 1.0)) == "faster"
    assert report.verdict(row(10.0, 2.0), row(12.0, 2.0)) == "within the spread"
    assert report.verdict(row(12.0, 2.0), row(10.0, 2.0)) == "within the spread"


def test_two_results_are_set_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, rows in {"a": [row(0.010, 1e-4)], "b": [row(0.012, 1e-4), row(0.1, 0.0, workload="new")]}.items():
        Results(tmp_path / name, {"commit": name}).add(rows)
    report.run(argparse.Namespace(before=tmp_path / "a", after=tmp_path / "b" / "results.json"))
    out = capsys.readouterr().out
    assert "commit: a -> b" in out and "+20.0%" in out and "slower" in out
    (added,) = (line for line in out.splitlines() if "0.100" in line or "100.000" in line)
    assert added.count("new") == 2  # the workload's name, and what became of it
    report.run(argparse.Namespace(before=tmp_path / "b", after=tmp_path / "a"))
    assert "gone" in capsys.readouterr().out
    Results(tmp_path / "c", {"commit": "c"}).add([replace(row(0.01, 1e-4), wrong="norm: off", median=None)])
    report.run(argparse.Namespace(before=tmp_path / "a", after=tmp_path / "c"))
    assert "wrong: norm: off" in capsys.readouterr().out


def test_the_share_is_that_of_a_copys_bandwidth() -> None:
    found = row(1.0, 0.0, bytes_per_parameter=32, copy_seconds=2.0, copy_bytes=128_000)
    assert found.bandwidth == 32_000.0
    assert found.share == 0.5
    assert replace(found, bytes_per_parameter=None).share is None


def test_a_table_shows_times_and_who_was_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    ours = replace(row(0.005, 1e-4), contender="tritonamp torch")
    bad = Row("gpt2", 148, 1000, "AdamW", "fp32", "torch loop", wrong="norm: 2.0, expected 1.0")
    report.console().print(report.table([row(0.010, 1e-4), ours, bad]))
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert next(words[2:7] for words in shown if "tritonamp" in words) == ["5.000", "4.940", "to", "5.060", "2.00"]
    assert ["torch", "loop", "wrong"] in shown


# What a step does.


class Moved(TorchDispatchMode):
    """Adds up the bytes of large tensors that operators read and write, by their schemas."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.bytes = least, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {a.name: (a, kwargs.get(a.name)) for a in func._schema.arguments}
        given.update({a.name: (a, value) for a, value in zip(func._schema.arguments, args, strict=False)})
        out = func(*args, **kwargs)
        if func.is_view:
            return out
        read = {t.data_ptr(): t.nbytes for _, value in given.values() for t in self.large(value)}
        written = {t.data_ptr(): t.nbytes for t in self.large(out)}
        for argument, value in given.values():
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.update({t.data_ptr(): t.nbytes for t in self.large(value)})
        self.bytes += sum(read.values()) + sum(written.values())
        return out

    def large(self, value: Any) -> list[Tensor]:
        tensors = value if isinstance(value, (list, tuple)) else [value]
        return [t for t in tensors if isinstance(t, Tensor) and t.numel() >= self.least]


@pytest.mark.parametrize("contender", ON_CPU, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_the_bytes_moved_are_those_of_the_operators(
    contender: Contender, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm, "_BLOCK", 1024)  # smaller tensors are gathered first
    problem = Problem([(1024,)] * 3, CPU)
    step = contender.make(RULES[rule], problem.params)
    check(contender, step, problem)
    problem.restore()
    step.scale_loss()
    with Moved(least=1024) as moved:
        step()
    # By its schema torch's fused step writes the gradients; it does so only where it divides them.
    unwritten = 4 if contender.name == "torch fused" else 0
    assert moved.bytes / problem.numel == contender.bytes_per_parameter(RULES[rule], is_fp16=False) + unwritten


def test_the_peak_is_the_most_memory_held_at_a_time() -> None:
    def step() -> None:
        a = torch.empty(1000)
        del a
        b, c = torch.empty(500), torch.empty(1500)
        del b
        torch.empty(200)
        del c

    assert measure._peak_on_cpu(step) == 4 * 2000


def test_operators_are_counted() -> None:
    class Three(Step):
        def scale_loss(self) -> None:
            pass

        def __call__(self) -> None:
            torch.ones(3).add_(1).neg()

    counts = measure.count(Problem([(3,)], CPU), Three())
    assert (counts.operators, counts.launches, counts.syncs) == (3, None, None)
    assert counts.peak_bytes == 24
