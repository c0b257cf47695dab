"""Bad input is refused early, by name, and leaves everything as it was."""

from __future__ import annotations

import copy
import importlib.util
import weakref
from typing import Any

import pytest
import torch
from conftest import IS_INTERPRETED, Runner
from problem import assert_refused, assert_same_bits, checked_step, make_params, scaled, set_grads

import tritonamp
from tritonamp import SGD, Adam, AdamW, LossScale

ALL = [SGD, Adam, AdamW]


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "lr must be at least 0, got -0.1"),
        ({"lr": float("nan")}, "lr must be at least 0, got nan"),
        ({"lr": torch.ones(2)}, "one element"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0, got -1.0"),
        ({"max_norm": -1.0}, "max_norm must be at least 0, got -1.0"),
        ({"max_norm": float("nan")}, "max_norm must be at least 0, got nan"),
        ({"skip_norm": -1.0}, "skip_norm must be at least 0, got -1.0"),
        ({"skip_norm": float("nan")}, "skip_norm must be at least 0, got nan"),
        ({"loss_scale": "static"}, "'auto', 'dynamic', a number, a LossScale or None, got 'static'"),
        ({"loss_scale": 0.0}, "scale must be finite and positive, got 0.0"),
        ({"loss_scale": True}, "loss_scale must be"),
        ({"loss_scale": [1.0]}, "loss_scale must be"),
        ({"loss_scale": 2.0, "skip_nonfinite": False}, "skip_nonfinite=False needs loss_scale=None, got 2.0"),
        ({"loss_scale": "dynamic", "skip_nonfinite": False}, "skip_nonfinite=False needs loss_scale=None"),
        ({"backend": "cuda"}, "'auto', 'triton' or 'torch', got 'cuda'"),
    ],
    ids=str,
)
def test_options_out_of_range(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        make(make_params([(2,)]), **options)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (SGD, {"momentum": -0.1}, "momentum must be at least 0, got -0.1"),
        (SGD, {"nesterov": True}, "nesterov needs a momentum and no dampening, got momentum=0.0"),
        (SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "dampening=0.1"),
        (Adam, {"betas": (1.0, 0.9)}, r"beta1 must be in \[0, 1\), got 1.0"),
        (AdamW, {"betas": (0.9, float("nan"))}, r"beta2 must be in \[0, 1\), got nan"),
        (Adam, {"eps": -1e-8}, "eps must be at least 0, got -1e-08"),
    ],
    ids=str,
)
def test_options_of_a_rule_out_of_range(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(make_params([(2,)]), **options)
    optimizer = make(make_params([(2,)]))
    with pytest.raises(ValueError, match=message):  # a group's own options too
        optimizer.add_param_group({"params": make_params([(2,)]), **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init_scale": 0.0}, "scale must be finite and positive, got 0.0"),
        ({"init_scale": -1.0}, "scale must be finite and positive"),
        ({"init_scale": float("inf")}, "scale must be finite and positive"),
        ({"init_scale": float("nan")}, "scale must be finite and positive"),
        ({"init_scale": 1e39}, "scale must be finite and positive"),  # no float32
        ({"init_scale": 2.0**-130}, "init_scale must be within"),
        ({"init_scale": 4.0, "max_scale": 2.0}, "init_scale must be within"),
        ({"growth_factor": 1.0}, "growth_factor must be finite and above 1, got 1.0"),
        ({"backoff_factor": 1.0}, r"backoff_factor must be in \(0, 1\), got 1.0"),
        ({"backoff_factor": 0.0}, "backoff_factor"),
        ({"growth_interval": 0}, "growth_interval must be an integer of at least 1, got 0"),
        ({"growth_interval": 1.5}, "growth_interval must be an integer"),
        ({"hysteresis": 0}, "hysteresis must be an integer of at least 1, got 0"),
        ({"min_scale": 4.0, "max_scale": 2.0}, "min_scale must be at least"),
        ({"min_scale": 0.0}, "min_scale must be at least"),
        ({"max_scale": float("inf")}, "max_scale must be a finite float32"),
    ],
    ids=str,
)
def test_loss_scale_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossScale(**settings)


@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
@pytest.mark.parametrize("case", ["sparse", "rows", "device", "shape", "integer", "complex"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_gradients_that_cannot_be_used(runner: Runner, case: str, first: bool) -> None:
    params = make_params([(3,), (4, 2)])
    optimizer = AdamW(params, loss_scale="dynamic", backend=runner.backend)
    if not first:
        set_grads(params, scaled(optimizer))
        checked_step(optimizer)
    set_grads(params, scaled(optimizer))
    messages = {
        "sparse": r"parameter 1 \(shape \(4, 2\).*sparse gradient",
        "rows": r"parameter 1 .* sparse gradient \(torch.sparse_csr\)",
        "device": "parameter 1 .* has a gradient on meta",
        "shape": r"parameter 1 .* gradient of shape \(2, 4\)",
        "integer": "parameter 1 .* gradient of torch.int64",
        "complex": "parameter 1 .* gradient of torch.complex64",
    }
    bad = {
        "sparse": torch.ones(4, 2).to_sparse(),
        "rows": torch.ones(4, 2).to_sparse_csr(),
        "device": torch.ones(4, 2, device="meta"),
        "shape": torch.ones(2, 4),
        "integer": torch.ones(4, 2, dtype=torch.int64),
        "complex": torch.ones(4, 2, dtype=torch.complex64),
    }[case]

    class Param(torch.nn.Parameter):  # autograd itself refuses such gradients; a subclass may hand out any
        grad = bad  # type: ignore[assignment]

    state = optimizer.state.pop(params[1], {})
    optimizer.param_groups[0]["params"][1] = Param(params[1].detach())
    if state:
        optimizer.state[optimizer.param_groups[0]["params"][1]] = state
    assert_refused(optimizer, RuntimeError, messages[case])
    optimizer.state.pop(optimizer.param_groups[0]["params"].pop(), None)
    checked_step(optimizer)


def test_parameters_that_cannot_be_optimized(runner: Runner) -> None:
    expanded = torch.ones(1).expand(3).detach()
    expanded.grad = torch.ones(3)
    optimizer = SGD([expanded], loss_scale="dynamic", backend=runner.backend)
    scaled(optimizer)
    assert_refused(optimizer, RuntimeError, "parameter 0 .* has elements that share memory")
    eighth = torch.ones(3).to(torch.float8_e5m2)
    eighth.grad = torch.ones(3).to(torch.float8_e5m2)
    optimizer = SGD([eighth], loss_scale="dynamic", backend=runner.backend)
    scaled(optimizer)
    with pytest.raises(TypeError, match=r"parameter 0 .*float8_e5m2.* cannot be optimized"):
        optimizer.step()


def test_a_parameter_that_has_no_data(runner: Runner) -> None:
    params = [*make_params([(3,)]), torch.ones(3, device="meta", requires_grad=True)]
    params[0].grad = torch.ones(3)
    optimizer = SGD(params, loss_scale="dynamic", backend=runner.backend)
    scaled(optimizer)
    with pytest.raises(RuntimeError, match=r"parameter 1 .* has no data"):
        optimizer.step()


@pytest.mark.compiled
def test_triton_where_it_cannot_run() -> None:
    params = make_params([(2,)])
    set_grads(params)
    optimizer = SGD(params, loss_scale=None, backend="triton")
    with pytest.raises(RuntimeError, match=r"backend='triton' .*use backend='auto'"):
        optimizer.step()


def test_triton_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="needs the package triton: install it"):
        SGD(make_params([(2,)]), backend="triton")
    SGD(make_params([(2,)]), backend="auto")


def test_import_needs_no_gpu_and_names_are_public() -> None:
    assert set(tritonamp.__all__) == {"SGD", "Adam", "AdamW", "GradScaler", "LossScale", "fuse"}
    assert IS_INTERPRETED or not SGD(make_params([(1,)]))._devices._backends


def test_a_parameter_given_twice_has_one_name(runner: Runner) -> None:
    p, q = make_params([(5,), (7,)])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = AdamW([("p", p), ("q", q), ("again", p)], loss_scale=None, backend=runner.backend)
    (group,) = optimizer.state_dict()["param_groups"]
    assert (group["params"], group["param_names"]) == ([0, 1], ["p", "q"])
    set_grads([p, q])
    checked_step(optimizer)


def test_frozen_parameters_may_be_anything(runner: Runner) -> None:
    """Quantized, elsewhere, or distributed: what has no gradient and asks for none is left out."""
    params = make_params([(5,), (7,)])
    frozen = [torch.ones(3, dtype=torch.uint8), torch.ones(2, device="meta"), torch.ones(4)]
    optimizer = AdamW([frozen[0], params[0], frozen[1], params[1], frozen[2]], loss_scale=None, backend=runner.backend)
    for step in range(3):
        set_grads(params)
        if step == 2:
            frozen[2].requires_grad_()
            set_grads([frozen[2]])
        optimizer.step()
    assert len(optimizer.state) == 3 and not torch.equal(frozen[2], torch.ones(4))


def test_distributed_tensors_are_refused(runner: Runner) -> None:
    class Sharded(torch.Tensor):
        """Like DTensor, a tensor without memory of its own."""

        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=True)

        def __init__(self, inner: torch.Tensor) -> None:
            self.inner = inner

        def __tensor_flatten__(self) -> Any:
            return ["inner"], None

        @staticmethod
        def __tensor_unflatten__(inner: Any, *args: Any) -> Any:
            return Sharded(inner["inner"])

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError("nothing may be done to it")

    params = make_params([(5,)])
    set_grads(params)
    optimizer = SGD([*params, Sharded(torch.ones(3))], loss_scale=None, backend=runner.backend)
    with pytest.raises(TypeError, match=r"parameter 1 .* is a Sharded: only plain tensors"):
        optimizer.step()

    class Param(torch.nn.Parameter):
        grad = Sharded(torch.ones(3))  # type: ignore[assignment]

    optimizer = SGD([*params, Param(torch.ones(3))], loss_scale=None, backend=runner.backend)
    with pytest.raises(TypeError, match=r"parameter 1 .* gradient that is a Sharded: only plain tensors"):
        optimizer.step()


def test_a_refused_group_may_be_taken_back(runner: Runner) -> None:
    params = make_params([(5,)])
    optimizer = AdamW(params, loss_scale=None, backend=runner.backend)
    set_grads(params)
    checked_step(optimizer)
    optimizer.add_param_group({"params": torch.ones(2, device="meta", requires_grad=True)})
    with pytest.raises(RuntimeError, match="has no data"):
        optimizer.step()
    optimizer.param_groups.pop()
    checked_step(optimizer)


@pytest.mark.parametrize("how", ["step", "unscale_", "refused step"])
def test_gradients_and_state_are_not_kept(runner: Runner, how: str) -> None:
    """After a step, zero_grad() frees the gradients, and offloading frees the state."""
    params = make_params([(5,)])
    optimizer = AdamW(params, loss_scale=2.0, backend=runner.backend)
    set_grads(params, scaled(optimizer))
    optimizer.step()
    set_grads(params, scaled(optimizer))
    grad = weakref.ref(params[0].grad)
    if how == "refused step":
        optimizer.param_groups[0]["max_norm"] = -1.0
        with pytest.raises(ValueError, match="max_norm"):
            optimizer.step()
    else:
        getattr(optimizer, how)()
    params[0].grad = None
    assert grad() is None
    state = weakref.ref(optimizer.state[params[0]]["exp_avg"])
    optimizer.state[params[0]]["exp_avg"] = torch.zeros(5)
    assert state() is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own access
def test_a_compiled_training_function_trains_like_an_eager_one(runner: Runner) -> None:
    """Tracing must not swallow what scale() notes down: gradients would then be taken as unscaled."""

    def train(compiled: bool) -> list[float]:
        torch.manual_seed(0)
        weight, x = torch.ones(6, requires_grad=True), torch.randn(6)
        optimizer = SGD([weight], lr=0.01, backend=runner.backend)

        def iteration() -> torch.Tensor:
            loss = (weight * x).square().sum()
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        torch._dynamo.reset()
        run = torch.compile(iteration, backend="eager") if compiled else iteration
        return [run().item() for _ in range(3)]

    assert train(compiled=True) == train(compiled=False)


def test_a_step_is_a_range_in_the_profiler(runner: Runner) -> None:
    params = make_params([(3,)])
    optimizer = AdamW(params, loss_scale=None, backend=runner.backend)
    set_grads(params)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    assert "Optimizer.step#AdamW.step" in {event.name for event in profile.events()}


def test_a_compiled_model_is_one_graph(runner: Runner) -> None:
    """Steps change its parameters in place, which neither breaks nor recompiles it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    twin = copy.deepcopy(model)
    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=count, fullgraph=True)
    ours, same = (AdamW(m.parameters(), lr=0.1, max_norm=1.0, backend=runner.backend) for m in (model, twin))
    for _ in range(4):
        x = torch.randn(16, 4)
        for forward, optimizer in ((compiled, ours), (twin, same)):
            optimizer.backward(forward(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    assert len(graphs) == 1
    assert_same_bits(list(model.parameters()), list(twin.parameters()))
