"""What users call, and what a call costs. Cases from public bug reports."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases.tools import leaf, scale_and_tracker, set_true_grads, steps_of, train
from conftest import Runner
from problem import assert_same_bits, values
from torch import Tensor

from tritonamp import SGD, Adam, AdamW, LossScale

INF, NAN = float("inf"), float("nan")


# step().


def test_a_step_without_gradients_does_nothing(runner: Runner) -> None:
    # AP-01, nerfstudio-project/nerfstudio#1919
    p = leaf(1.0)
    optimizer = AdamW([p], loss_scale=LossScale(8.0, growth_interval=1), backend=runner.backend)
    optimizer.step()
    train(optimizer, None)
    assert p.item() == 1.0 and not optimizer.state.get(p)
    assert scale_and_tracker(optimizer) == (8.0, 0)


@pytest.mark.parametrize("make", [SGD, Adam, AdamW])
def test_hooks_fire_once_per_step(runner: Runner, make: Any) -> None:
    # AP-02, kozistr/pytorch_optimizer#122, pytorch/torchrec#864
    optimizer = make([leaf(1.0)], loss_scale="dynamic", backend=runner.backend)
    assert isinstance(optimizer, torch.optim.Optimizer)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    with torch.autograd.profiler.profile() as profile:
        for grad in (1.0, INF):
            train(optimizer, grad)
    assert seen == ["pre", "post"] * 2
    names = [event.name for event in profile.function_events]
    assert names.count(f"Optimizer.step#{make.__name__}.step") == 2


@pytest.mark.parametrize("loss_scale", [None, "dynamic"])
def test_a_closure_runs_once_with_gradients_enabled(runner: Runner, loss_scale: str | None) -> None:
    # AP-03, NVIDIA/apex#361, Lightning-AI/pytorch-lightning#2785
    p = leaf(1.0)
    optimizer = SGD([p], lr=0.1, loss_scale=loss_scale, backend=runner.backend)
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        loss = 3 * p
        optimizer.backward(loss)
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    assert loss.item() == 3.0 and p.item() == pytest.approx(0.7)


def test_a_missing_closure_may_be_named(runner: Runner) -> None:
    # AP-03, huggingface/peft#3382
    p = leaf(1.0, grad=1.0)
    assert SGD([p], lr=0.1, backend=runner.backend).step(closure=None) is None
    assert p.item() == pytest.approx(0.9)


@pytest.mark.parametrize("options", [{}, {"set_to_none": True}, {"set_to_none": False}], ids=str)
def test_zero_grad_clears_an_overflow(runner: Runner, options: dict[str, bool]) -> None:
    # AP-04, NVIDIA/apex#1579, pytorch/pytorch#42754
    p = leaf([1.0, 1.0])
    optimizer = SGD([p], lr=0.1, loss_scale=LossScale(8.0), backend=runner.backend)
    train(optimizer, [INF, 1.0])
    grad = p.grad
    assert grad is not None
    optimizer.zero_grad(**options)
    if options.get("set_to_none", True):
        assert p.grad is None
    else:
        assert p.grad is grad and grad.tolist() == [0.0, 0.0]
    optimizer.backward(p.sum())
    optimizer.step()
    assert p.tolist() == pytest.approx([0.9, 0.9])


def test_the_norm_is_readable_after_every_step(runner: Runner) -> None:
    # AP-08, radixark/miles#611
    optimizer = SGD([leaf([1.0, 1.0])], loss_scale="dynamic", backend=runner.backend)
    norms = [float(optimizer.grad_norm)]
    for grad in ([3.0, 4.0], [INF, 1.0], [NAN, 1.0], [3.0, 4.0], None):
        train(optimizer, grad)
        norms.append(float(optimizer.grad_norm))
    assert norms == pytest.approx([NAN, 5.0, INF, NAN, 5.0, 0.0], nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("unscale_first", [False, True], ids=["step", "unscale"])
def test_halves_are_trained(runner: Runner, dtype: torch.dtype, unscale_first: bool) -> None:
    # AP-09, pytorch/pytorch#74739, facebookresearch/fairscale#834
    p = leaf(1.0, dtype=dtype)
    optimizer = SGD([p], lr=0.125, loss_scale=LossScale(1024.0), backend=runner.backend)
    set_true_grads(optimizer, 1.0)
    if unscale_first:
        optimizer.unscale_()
    optimizer.step()
    assert p.item() == 0.875


@pytest.mark.parametrize("make", [SGD, Adam, AdamW])
def test_the_gradients_are_not_used_as_a_scratchpad(runner: Runner, make: Any) -> None:
    # AP-10, ml-explore/mlx#4426: no decay, sign or momentum in them; only the torch backend unscales and clips them
    p = leaf([1.0, 1.0])
    options = {"momentum": 0.9} if make is SGD else {}
    optimizer = make(
        [p], lr=0.1, weight_decay=0.5, maximize=True, max_norm=1.0, loss_scale=8.0, backend=runner.backend, **options
    )
    for _ in range(2):
        train(optimizer, [3.0, 4.0])
        assert p.grad is not None
        assert p.grad.tolist() == pytest.approx([0.6, 0.8] if runner.backend == "torch" else [24.0, 32.0])


# Groups and their options.

# Options, then a change of them; the gradients and parameters of a step before and one after it.
CHANGES = {
    "lr": (SGD, {"lr": 0.1}, {"lr": 0.01}, (1.0, 1.0), 1.0, (0.9, 0.89)),
    "weight_decay": (SGD, {"lr": 1.0}, {"weight_decay": 0.1}, (0.0, 0.0), 1.0, (1.0, 0.9)),
    "momentum": (SGD, {"lr": 1.0, "momentum": 0.9}, {"momentum": 0.5}, (1.0, 1.0), 0.0, (-1.0, -2.5)),
    "maximize": (SGD, {"lr": 1.0}, {"maximize": True}, (1.0, 1.0), 0.0, (-1.0, 0.0)),
    "max_norm": (SGD, {"lr": 1.0}, {"max_norm": 1.0}, (4.0, 4.0), 0.0, (-4.0, -5.0)),
    "betas": (Adam, {"lr": 1.0, "betas": (0.9, 0.9), "eps": 0.0}, {"betas": (0.0, 0.0)}, (1.0, 2.0), 0.0, (-1.0, -2.0)),
    "eps": (Adam, {"lr": 1.0, "eps": 0.0}, {"eps": 1.0}, (1.0, 1.0), 0.0, (-1.0, -1.5)),
    "decay_of_AdamW": (AdamW, {"lr": 0.1, "weight_decay": 0.0}, {"weight_decay": 1.0}, (0.0, 0.0), 1.0, (1.0, 0.9)),
}  # fmt: skip


@pytest.mark.parametrize(("make", "options", "change", "grads", "start", "expected"), CHANGES.values(), ids=CHANGES)
def test_an_option_changed_between_steps_counts_at_once(
    runner: Runner,
    make: Any,
    options: dict[str, Any],
    change: dict[str, Any],
    grads: tuple[float, float],
    start: float,
    expected: tuple[float, float],
) -> None:
    # AP-05, tracel-ai/burn#5779, pytorch/pytorch#76368
    p = leaf(start)
    optimizer = make([p], loss_scale=None, backend=runner.backend, **options)
    seen = []
    for grad in grads:
        train(optimizer, grad)
        seen.append(p.item())
        optimizer.param_groups[0].update(change)
    assert seen == pytest.approx(list(expected))


@pytest.mark.parametrize("make", [SGD, Adam])
def test_a_tensor_lr_is_read_live(runner: Runner, make: Any) -> None:
    # AP-06, pytorch/pytorch#106121, pytorch/pytorch#126750
    p, lr = leaf(1.0), torch.tensor(0.1)
    optimizer = make([p], lr=lr, loss_scale=None, backend=runner.backend)
    assert optimizer.param_groups[0]["lr"] is lr
    train(optimizer, 1.0)
    assert p.item() == pytest.approx(0.9)
    lr.fill_(0.01)
    train(optimizer, 1.0)
    assert p.item() == pytest.approx(0.89)


def test_an_empty_group_is_nothing_to_do(runner: Runner) -> None:
    # AP-07, NVIDIA/TransformerEngine#3318
    optimizer = Adam([{"params": []}], lr=0.1, loss_scale=None, backend=runner.backend)
    optimizer.step()
    p = leaf(1.0)
    optimizer.add_param_group({"params": [p]})
    train(optimizer, 1.0)
    assert p.item() == pytest.approx(0.9)


def test_a_group_added_later_takes_part(runner: Runner) -> None:
    # AP-07, NVIDIA/TransformerEngine#1986
    a, b = leaf(1.0), leaf(1.0)
    optimizer = Adam([a], lr=0.01, loss_scale=LossScale(8.0), backend=runner.backend)
    for _ in range(5):
        train(optimizer, 3.0)
    optimizer.add_param_group({"params": [b]})
    train(optimizer, 3.0, 4.0)
    assert b.item() == pytest.approx(0.99)
    assert steps_of(optimizer) == [6, 1]
    assert float(optimizer.grad_norm) == pytest.approx(5.0)
    before = values(optimizer)
    train(optimizer, 3.0, INF)
    assert_same_bits(values(optimizer), before)
    assert scale_and_tracker(optimizer) == (4.0, 0)


REFUSED = [
    *((make, {"lr": value}) for make in (SGD, Adam, AdamW) for value in (-0.1, NAN)),
    *((make, {"weight_decay": value}) for make in (SGD, Adam, AdamW) for value in (-0.1, NAN)),
    *((make, {"eps": value}) for make in (Adam, AdamW) for value in (-1e-8, NAN)),
    *((Adam, {"betas": value}) for value in ((1.0, 0.999), (0.9, 1.0), (-0.1, 0.9), (0.9, NAN))),
    *((AdamW, {"betas": value}) for value in ((1.0, 0.999), (0.9, 1.0))),
    (SGD, {"momentum": -0.9}),
]  # fmt: skip


@pytest.mark.parametrize(("make", "option"), REFUSED, ids=str)
def test_an_option_out_of_range_is_refused(make: Any, option: dict[str, Any]) -> None:
    # AP-11
    (name,) = option
    for build in (lambda: make([leaf(1.0)], **option), lambda: make([{"params": [leaf(1.0)], **option}])):
        with pytest.raises(ValueError, match="beta" if name == "betas" else name):
            build()


def test_lr_0_moves_the_state_alone(runner: Runner) -> None:
    # AP-11
    p = leaf(1.0)
    optimizer = Adam([p], lr=0.0, loss_scale=None, backend=runner.backend)
    train(optimizer, 1.0)
    assert p.item() == 1.0
    assert steps_of(optimizer) == [1]
    assert optimizer.state[p]["exp_avg"].item() == pytest.approx(0.1)


def test_beta1_0_keeps_no_average(runner: Runner) -> None:
    # AP-11
    p = leaf(0.0)
    optimizer = Adam([p], lr=1.0, betas=(0.0, 0.999), loss_scale=None, backend=runner.backend)
    train(optimizer, 2.0)
    train(optimizer, 2.0)
    assert p.item() == pytest.approx(-2.0)


# What a step costs.


@contextlib.contextmanager
def syncs_refused() -> Iterator[None]:
    """On a GPU, an error where the host waits for it."""
    if not torch.cuda.is_available():
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_step_does_not_wait_for_the_device(triton_runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    # PE-02, huggingface/accelerate#1714
    optimizer = AdamW([leaf([1.0, 2.0])], max_norm=1.0, loss_scale="dynamic", backend="triton")
    train(optimizer, 1.0)
    waits = []

    def counted(name: str) -> Any:
        stock = getattr(Tensor, name)
        return lambda *args: waits.append(name) or stock(*args)

    for grad in (1.0, INF, 1.0):
        set_true_grads(optimizer, grad)
        with monkeypatch.context() as patch, syncs_refused():
            for name in ("item", "tolist", "cpu", "__bool__", "__float__", "__int__", "__index__"):
                patch.setattr(Tensor, name, counted(name))
            optimizer.step()
    assert waits == []


@pytest.mark.compiled
def test_nothing_recompiles(triton_runner: Runner) -> None:
    # PE-03, triton-lang/triton#644, Dao-AILab/flash-attention#911
    from tritonamp.backends.triton import step_kernel

    p = torch.ones(32).requires_grad_()
    optimizer = AdamW([p], max_norm=1.0, loss_scale=LossScale(8.0, growth_interval=3), backend="triton")
    counts = []
    for step in range(20):
        scale = float(optimizer.scale(torch.ones(())))
        p.grad = torch.full((40,), scale)[step % 4 : step % 4 + 32]
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9
        counts.append(sum(len(caches[0]) for caches in step_kernel.device_caches.values()))
    assert counts == [counts[0]] * 20


def bytes_allocated(step: Callable[[], Any]) -> int:
    """The sum of everything allocated during a step, freed since or not."""
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    return sum(max(event.nbytes(), 0) for event in events if event.name() == "[memory]")


@pytest.mark.parametrize("make", [SGD, AdamW])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_step_allocates_nothing_as_large_as_a_gradient(
    runner: Runner, make: Any, max_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # PE-04, pytorch/pytorch#121857, pytorch/pytorch#97712
    from tritonamp.backends import norm

    if runner.backend == "torch" and torch.get_default_device().type != "cpu":
        pytest.skip("only on a CPU are torch's fused kernels used")
    monkeypatch.setattr(norm, "_BLOCK", 256)
    params = [torch.ones(4096).requires_grad_() for _ in range(2)]
    optimizer = make(params, max_norm=max_norm, loss_scale=8.0, backend=runner.backend)
    train(optimizer, 1.0, 1.0)
    set_true_grads(optimizer, 1.0, 1.0)
    assert bytes_allocated(optimizer.step) < 4096 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_need_no_copies_of_halves_and_transposes(triton_runner: Runner, dtype: torch.dtype) -> None:
    # PE-04, pytorch/pytorch#97712
    p = torch.ones(64, 32, dtype=dtype).requires_grad_()
    p.grad = torch.ones(32, 64, dtype=dtype).t()
    optimizer = AdamW([p], max_norm=1.0, loss_scale=None, backend="triton")
    optimizer.step()
    assert bytes_allocated(optimizer.step) < 2048 * p.itemsize


@pytest.mark.gpu
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_the_peak_memory_of_a_step_does_not_grow_with_the_gradients(max_norm: float | None) -> None:
    # PE-04, pytorch/pytorch#121857, pytorch/pytorch#97712
    p = torch.ones(2**24, device="cuda").requires_grad_()
    optimizer = AdamW([p], max_norm=max_norm, loss_scale=8.0, backend="triton")
    train(optimizer, 1.0)
    set_true_grads(optimizer, 1.0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < 2**20


def test_no_step_spoils_the_barrier_for_the_next(triton_runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    # PE-05, triton-lang/triton#1452: more chunks than programs; skipped, empty and aborted steps in between
    from tritonamp.backends import triton as backend

    class Aborted:
        def __getitem__(self, grid: Any) -> Any:
            def launch(words: Tensor, partials: Tensor, counters: Tensor, *args: Any, **kwargs: Any) -> None:
                counters.fill_(1)  # one program had arrived
                raise RuntimeError("device fell over")

            return launch

    p = torch.ones(5000).requires_grad_()
    optimizer = SGD([p], lr=0.125, loss_scale=LossScale(8.0), backend="triton")
    for kind in ("good", "skipped", "good", "empty", "good", "aborted", "good"):
        set_true_grads(optimizer, {"skipped": INF, "empty": None}.get(kind, 1.0))
        if kind == "aborted":
            with monkeypatch.context() as patch:
                patch.setattr(backend, "step_kernel", Aborted())
                with pytest.raises(RuntimeError, match="fell over"):
                    optimizer.step()
        else:
            optimizer.step()
    assert p.min().item() == p.max().item() == 0.5
    assert scale_and_tracker(optimizer) == (4.0, 3)


@pytest.mark.gpu
def test_the_grid_of_a_large_step_is_resident() -> None:
    # PE-05, triton-lang/triton#5381, ROCm/hip#1456: a cooperative launch is refused otherwise
    p = torch.ones(2**26, device="cuda").requires_grad_()
    optimizer = SGD([p], lr=0.125, max_norm=1e9, loss_scale=LossScale(8.0), backend="triton")
    for grad in (1.0, INF, 1.0):
        train(optimizer, grad)
    assert p.min().item() == p.max().item() == 0.75
