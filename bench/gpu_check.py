"""What only a GPU can show: the real launch against the oracle, repeatability, CUDA graphs, and that nothing waits.

``python -m bench.gpu_check`` needs torch and triton, and no pytest. It stops at the first wrong result. On a CPU the
checks run on the virtual GPU, but for those that need CUDA itself.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import tritonamp
from tritonamp.backends import table
from tritonamp.backends import triton as backend
from tritonamp.testing import ScaleState, expect, next_scale

from .contenders import CONTENDERS, RULES
from .measure import on_device
from .problem import Problem, check

SHAPES = [(1,), (7,), (0,), (8, 3), (511,), (512,), (3, 171), (1030,), (1, 2, 600)]
DTYPES = [(torch.float32, torch.float32), (torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)]
OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (tritonamp.AdamW, {"lr": 0.01}),
    (tritonamp.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    (tritonamp.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2}),
    (tritonamp.SGD, {"lr": 0.1}),
    (tritonamp.AdamW, {"lr": 0.01, "master_weights": True}),
    (tritonamp.AdamW, {"lr": 0.01, "rounding": "stochastic"}),
]


@dataclass(frozen=True)
class Setting:
    """Where the checks run, and how large they are.

    Attributes:
        device: of the tensors; on a CPU the kernels run on the virtual GPU.
        large: elements of a large tensor.
        steps: of a long run.
    """

    device: torch.device
    large: int
    steps: int

    @property
    def is_cuda(self) -> bool:
        """Whether there is a GPU."""
        return self.device.type == "cuda"


def main() -> None:
    """Run the checks that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=CHECKS, metavar="CHECK", help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--large", type=int, help="elements of a large tensor")
    parser.add_argument("--steps", type=int, help="steps of a long run")
    args = parser.parse_args()
    large, steps = (50_000_000, 1000) if args.device == "cuda" else (20_000, 20)
    device = torch.device(args.device)
    setting = Setting(device, large if args.large is None else args.large, steps if args.steps is None else args.steps)
    sys.exit(run(setting, args.only or list(CHECKS)))


def run(setting: Setting, names: Sequence[str]) -> int:
    """Run checks in order, up to the first that fails; returns the exit status."""
    for name in names:
        carry_out, needs_cuda = CHECKS[name]
        if needs_cuda and not setting.is_cuda:
            print(f"skip  {name}: needs CUDA", flush=True)
            continue
        start = time.perf_counter()
        torch.manual_seed(0)
        try:
            with launching(setting):
                carry_out(setting)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told
            print(f"WRONG {name}: {type(error).__name__}: {error}", flush=True)
            return 1
        print(f"ok    {name} ({time.perf_counter() - start:.1f} s)", flush=True)
    return 0


@contextlib.contextmanager
def launching(setting: Setting) -> Iterator[None]:
    """Where kernels can be launched."""
    if setting.is_cuda:
        yield
        return
    from tritonamp.testing.virtual_gpu import virtual_gpu

    # Small chunks, so that small tensors make several.
    with virtual_gpu(sms=3, auto_register=True, traffic=False), mock.patch.object(table, "MIN_CHUNK", 512):
        yield


def make_params(setting: Setting, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    """Parameters of every shape and dtype, with the dtype that their gradients have."""
    params = []
    for grad_dtype, dtype in DTYPES:
        for shape in shapes:
            param = torch.randn(shape, device=setting.device).to(dtype).requires_grad_()
            if grad_dtype != dtype:
                param.grad_dtype = grad_dtype  # type: ignore[attr-defined]
            params.append(param)
    return params


def set_grads(params: Sequence[Tensor], scale: float) -> None:
    """Random gradients that carry a scale."""
    for param in params:
        dtype = getattr(param, "grad_dtype", None) or param.dtype
        param.grad = (torch.randn(param.shape, device=param.device) * scale).to(dtype)


def scaled(optimizer: Any) -> float:
    """Tell the optimizer that a loss was scaled; returns the scale."""
    return float(optimizer.scale(torch.ones((), device=optimizer.param_groups[0]["params"][0].device)))


def bits(optimizer: Any) -> list[Tensor]:
    """Copies of parameters, state, loss scale and outcome, as bytes."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [t for p in params for t in optimizer.state[p].values()]
    all_tensors = [*params, *states, optimizer._scale_state(), optimizer._outcome_state()]
    return [t.detach().clone().reshape(-1).view(torch.uint8) for t in all_tensors]


def require(condition: bool, what: str) -> None:
    """Raise AssertionError unless the condition holds; ``assert`` may be switched off."""
    if not condition:
        raise AssertionError(what)


def require_same(a: Sequence[Tensor], b: Sequence[Tensor], what: str) -> None:
    """Raise AssertionError at the first tensor that differs in any bit."""
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        require(torch.equal(x, y), f"{what}: tensor {i} differs in {int((x != y).sum())} of {len(x)} bytes")


# The checks.


def steps_equal_the_oracle(setting: Setting, **more: Any) -> None:
    """Every rule, dtypes mixed, with clipping, an overflow, and a gradient that is missing."""
    for rule, options in OPTIMIZERS:
        params = make_params(setting)
        optimizer = rule(params, max_norm=1.0, loss_scale="dynamic", backend="triton", **options, **more)
        for number in range(4):
            set_grads(params, scaled(optimizer) * 0.01)
            if number == 1:
                params[-1].grad.view(-1)[-1] = torch.inf  # type: ignore[union-attr]
            if number == 2:
                params[3].grad = None
            expected = expect(optimizer)
            optimizer.step()
            expected.check()


def agreed_steps_equal_the_oracle(setting: Setting) -> None:
    """The same in two launches, with a collective in between: of one rank."""
    backend = "nccl" if setting.is_cuda else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        steps_equal_the_oracle(setting, process_group=torch.distributed.group.WORLD)
    finally:
        torch.distributed.destroy_process_group()


def steps_on_two_devices_equal_the_oracle(setting: Setting) -> None:
    """Every other parameter on a second GPU, or on the CPU where there is none; a checkpoint in between."""
    other = torch.device("cuda", 1) if torch.cuda.device_count() > 1 else torch.device("cpu")
    for rule, options in OPTIMIZERS:
        params = make_params(setting)
        for param in params[1::2]:
            param.data = param.data.to(other)
        optimizer = rule(params, max_norm=1.0, loss_scale="dynamic", **options)
        for number in range(5):
            set_grads(params, scaled(optimizer) * 0.01)
            if number in (1, 2):
                params[-number].grad.view(-1)[-1] = torch.inf  # on either device
            expected = expect(optimizer)
            optimizer.step()
            expected.check()
            if number == 3:
                optimizer.load_state_dict(optimizer.state_dict())


def large_steps_equal_the_oracle(setting: Setting) -> None:
    """Many chunks for every program, of two tensors; a sample is compared."""
    triton = next(contender for contender in CONTENDERS if contender.name == "tritonamp triton")
    problem = Problem([(setting.large + 5,), (3, setting.large // 7)], setting.device)
    for rule in RULES.values():
        check(triton, triton.make(rule, problem.params), problem)


def loss_scale_and_counters_equal_a_host_model(setting: Setting) -> None:
    """A long run with overflows at random; the host looks at nothing before its end."""
    draw, growth = random.Random(0), {"growth_interval": 3, "max_scale": 2.0**14, "min_scale": 2.0, "hysteresis": 2}
    param = torch.randn(3000, device=setting.device).requires_grad_()
    scale = tritonamp.LossScale(256.0, **growth)  # type: ignore[arg-type]
    optimizer = tritonamp.SGD([param], lr=1e-3, loss_scale=scale, backend="triton")
    model, skipped, consecutive = ScaleState(256.0, **growth), 0, 0  # type: ignore[arg-type]
    wanted, seen, loss = [], [], torch.ones((), device=setting.device)
    for _ in range(setting.steps):
        overflows = draw.random() < 0.4
        optimizer.scale(loss)
        param.grad = torch.randn(3000, device=setting.device)
        if overflows:
            param.grad[draw.randrange(3000)] = draw.choice([torch.inf, -torch.inf, torch.nan])
        optimizer.step()
        model = next_scale(model, overflows)
        skipped, consecutive = skipped + overflows, (consecutive + 1) * overflows
        wanted.append([model.scale, float(overflows), skipped, consecutive])
        now = (scale.value, optimizer.found_inf, optimizer.skipped_steps, optimizer.consecutive_skips)
        seen.append(torch.stack([value.double() for value in now]))
    found = torch.stack(seen).tolist()
    wrong = next((i for i, (got, want) in enumerate(zip(found, wanted, strict=True)) if got != want), None)
    require(wrong is None, f"step {wrong}: {wrong is not None and (found[wrong], wanted[wrong])} (found, expected)")
    require(skipped > 0 and len({want[0] for want in wanted}) > 2, "a run in which nothing happens shows nothing")


def results_repeat_bitwise(setting: Setting) -> None:
    """The same bits again, for every number of programs, and from two launches instead of one."""

    def train(resident: int, is_split: bool = False) -> list[Tensor]:
        torch.manual_seed(1)
        with mock.patch.object(backend, "MAX_RESIDENT", resident):
            params = make_params(setting, [*SHAPES, (setting.large // 10,)])
            optimizer = tritonamp.AdamW(params, lr=0.01, max_norm=1.0, loss_scale="dynamic", backend="triton")
            for number in range(4):
                set_grads(params, scaled(optimizer) * 0.01)
                if number == 2:
                    params[0].grad.fill_(torch.nan)  # type: ignore[union-attr]
                optimizer.step()
                if is_split:
                    optimizer._devices.on(optimizer._device())._is_split = True  # type: ignore[attr-defined]
        return bits(optimizer)

    first = train(backend.MAX_RESIDENT)
    require_same(train(backend.MAX_RESIDENT), first, "second run")
    require_same(train(1), first, "one program per multiprocessor")
    require_same(train(backend.MAX_RESIDENT, is_split=True), first, "two launches")


def a_step_is_one_launch_and_never_waits(setting: Setting) -> None:
    """From the second step on, with gradients that move: one kernel, at most one copy, no wait."""
    params = make_params(setting)
    optimizer = tritonamp.AdamW(params, max_norm=1.0, loss_scale="dynamic", backend="triton")
    loss = torch.ones((), device=setting.device)
    for number in range(5):
        set_grads(params, scaled(optimizer) * 0.01)
        torch.cuda.synchronize()
        if number < 2:
            optimizer.step()
        elif number == 2:
            launches, copies, syncs = on_device(optimizer.step)
            require((launches, syncs) == (1, 0), f"{launches} launches and {syncs} syncs, expected 1 and 0")
            require(copies <= 1, f"{copies} copies, expected at most 1")
        else:
            torch.cuda.set_sync_debug_mode("error")
            try:
                optimizer.scale(loss)
                optimizer.step()
                for value in (optimizer.grad_norm, optimizer.found_inf, optimizer.loss_scale.value):  # type: ignore[union-attr]
                    value.add(1)
            finally:
                torch.cuda.set_sync_debug_mode("default")


def a_cuda_graph_replays_backward_and_step(setting: Setting) -> None:
    """Replays give the bits that eager iterations give, overflows and growth of the scale included."""
    batches = [torch.randn(64, 64, device=setting.device) for _ in range(30)]
    for batch in batches[4::7]:
        batch[5, 5] = torch.inf

    def train(is_replayed: bool) -> list[Tensor]:
        torch.manual_seed(1)
        weight, bias = (torch.randn(shape, device=setting.device).requires_grad_() for shape in [(64, 64), (64,)])
        scale = tritonamp.LossScale(256.0, growth_interval=3)
        optimizer = tritonamp.AdamW([weight, bias], lr=0.01, max_norm=0.1, loss_scale=scale, backend="triton")
        x, graph, aside = torch.empty(64, 64, device=setting.device), torch.cuda.CUDAGraph(), torch.cuda.Stream()

        def iterate() -> None:
            optimizer.zero_grad()
            optimizer.backward((x * weight + bias).square().mean())
            optimizer.step()

        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for batch in batches[:3]:
                x.copy_(batch)
                iterate()
        torch.cuda.current_stream().wait_stream(aside)
        if is_replayed:
            with torch.cuda.graph(graph):
                iterate()
        for batch in batches[3:]:
            x.copy_(batch)
            graph.replay() if is_replayed else iterate()
        require(int(optimizer.skipped_steps) == len(batches[4::7]), f"{int(optimizer.skipped_steps)} steps skipped")
        return bits(optimizer)

    require_same(train(True), train(False), "replayed")


def offsets_are_64_bits_wide(setting: Setting) -> None:
    """More than 2^31 elements in one tensor."""
    n = 2**31 + 8
    param = torch.zeros(n, dtype=torch.float16, device=setting.device).requires_grad_()
    param.grad = torch.ones_like(param)
    optimizer = tritonamp.SGD([param], lr=0.125, loss_scale=None, backend="triton")
    optimizer.step()
    require(bool((param == -0.125).all()), f"{int((param != -0.125).sum())} elements are wrong")
    norm = float(optimizer.grad_norm)
    require(abs(norm - n**0.5) <= 5e-7 * n**0.5, f"norm: {norm}, expected {n**0.5}")


CHECKS: dict[str, tuple[Callable[[Setting], None], bool]] = {  # and whether they need CUDA
    "oracle": (steps_equal_the_oracle, False),
    "agreed": (agreed_steps_equal_the_oracle, False),
    "devices": (steps_on_two_devices_equal_the_oracle, True),
    "large": (large_steps_equal_the_oracle, False),
    "scale": (loss_scale_and_counters_equal_a_host_model, False),
    "repeat": (results_repeat_bitwise, False),
    "launch": (a_step_is_one_launch_and_never_waits, True),
    "graph": (a_cuda_graph_replays_backward_and_step, True),
    "offsets": (offsets_are_64_bits_wide, True),
}

if __name__ == "__main__":
    main()
