"""Layouts, sizes and kinds of tensors. Cases from public bug reports."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases.tools import leaf, params_of, scale_and_tracker, steps_of, train
from conftest import Runner
from torch import Tensor

from tritonamp import SGD, Adam, AdamW, LossScale

# Strides.

GRADS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    # PL-01, pytorch/pytorch#106951: any stride is right for a dimension of size 1
    "odd_stride_of_size_1": lambda: (torch.zeros(2, 1, 3), torch.randn(6).as_strided((2, 1, 3), (3, 1, 1))),
    # PL-02, pytorch/pytorch#110758, pytorch/pytorch#126585
    "transposed_conv_grad": lambda: (torch.zeros(4, 3, 2, 2), torch.randn(2, 2, 3, 4).permute(3, 2, 0, 1)),
    "channels_last_param": lambda: (
        torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last), torch.randn(4, 3, 2, 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("make_pair", GRADS.values(), ids=GRADS)
def test_elements_are_matched_by_logical_index(runner: Runner, make_pair: Callable[[], tuple[Tensor, Tensor]]) -> None:
    p, grad = make_pair()
    p.requires_grad_().grad = grad
    optimizer = SGD([p], lr=1.0, loss_scale=None, backend=runner.backend)
    optimizer.step()
    assert torch.equal(p, -grad)


def test_a_slice_is_updated_and_nothing_beside_it(runner: Runner) -> None:
    # PL-04, bitsandbytes-foundation/bitsandbytes#1185
    buf = torch.zeros(2, 4)
    p = buf[:, :2].detach().requires_grad_()
    train(SGD([p], lr=1.0, loss_scale=None, backend=runner.backend), [[1.0, 2.0], [3.0, 4.0]])
    assert buf.tolist() == [[-1.0, -2.0, 0.0, 0.0], [-3.0, -4.0, 0.0, 0.0]]


@pytest.mark.parametrize("max_norm", [None, 1e6])
def test_a_gradient_in_a_flat_bucket_leaves_its_neighbours_alone(runner: Runner, max_norm: float | None) -> None:
    # PL-05, pytorch/pytorch#47163, pytorch/pytorch#70222
    p = leaf([0.0] * 3)
    bucket = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]) * 8
    optimizer = SGD([p], lr=1.0, max_norm=max_norm, loss_scale=8.0, backend=runner.backend)
    optimizer.scale(p)
    p.grad = bucket[1:4]
    optimizer.step()
    assert p.tolist() == [-2.0, -3.0, -4.0]
    assert bucket[[0, 4]].tolist() == [8.0, 40.0]


@pytest.mark.parametrize("unscale_first", [False, True], ids=["step", "unscale"])
def test_an_expanded_gradient_is_unscaled_once(runner: Runner, unscale_first: bool) -> None:
    # PL-05, pytorch/pytorch#44344
    p = leaf([0.0] * 3)
    optimizer = SGD([p], lr=1.0, loss_scale=8.0, backend=runner.backend)
    optimizer.scale(p)
    p.grad = torch.tensor(8.0).expand(3)
    if unscale_first:
        optimizer.unscale_()
    optimizer.step()
    assert p.tolist() == [-1.0, -1.0, -1.0]
    assert float(optimizer.grad_norm) == pytest.approx(math.sqrt(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("make", [SGD, Adam])
def test_alignment_does_not_matter(runner: Runner, make: Any, dtype: torch.dtype) -> None:
    # PL-06, triton-lang/triton#1330, pytorch/pytorch#151859
    n, grads = 20, torch.ones(22, dtype=dtype)
    aligned = torch.ones(n, dtype=dtype).requires_grad_()
    misaligned = torch.ones(n + 1, dtype=dtype)[1:].detach().requires_grad_()
    for p in (aligned, misaligned):
        optimizer = make([p], lr=0.125, loss_scale=None, backend=runner.backend)
        for step, offset in enumerate((0, 1, 2), 1):
            p.grad = grads[offset : offset + n]
            optimizer.step()
            assert p.tolist() == pytest.approx([1 - 0.125 * step] * n)


def test_offsets_are_64_bit(triton_runner: Runner) -> None:
    # PL-10, microsoft/dion#103, triton-lang/triton#832
    from cases.probe import find

    assert find(7864320, 319, 2508718085, 7) == (2508718080, 5, 7 * 2508718080)
    assert find(3000000, 1024, 2**40, 1) == (3072000000, 1024, 3072000000)


def test_strides_are_64_bit(runner: Runner) -> None:
    # PL-10, triton-lang/triton#6748: of the buffer only three pages are ever touched
    far = 2**31 + 6
    buf = torch.empty(far + 2, dtype=torch.float16)
    p, grad = (buf.as_strided((2,), (far,), start) for start in (0, 1))
    p.fill_(0.0)
    grad.copy_(torch.tensor([3.0, 4.0]))
    p = p.detach().requires_grad_()
    p.grad = grad
    optimizer = SGD([p], lr=1.0, loss_scale=None, backend=runner.backend)
    optimizer.step()
    assert p.tolist() == [-3.0, -4.0]
    assert float(optimizer.grad_norm) == pytest.approx(5.0)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_the_last_element_of_more_than_2_to_the_31(backend: str) -> None:
    # PL-09, NVIDIA/apex#1654, deepspeedai/DeepSpeed#7640, NVIDIA/TransformerEngine#2918
    numel = 2**31 + 8
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB of free device memory")
    p = torch.zeros(numel, dtype=torch.bfloat16, device="cuda").requires_grad_()
    p.grad = torch.zeros_like(p)
    p.grad[[0, -1]] = torch.tensor([3.0, 4.0], dtype=p.dtype, device="cuda")
    optimizer = SGD([p], lr=1.0, loss_scale=None, backend=backend)
    optimizer.step()
    assert p[[0, 1, -2, -1]].tolist() == [-3.0, 0.0, 0.0, -4.0]
    assert float(optimizer.grad_norm) == pytest.approx(5.0)


# Sizes.


@pytest.mark.parametrize("where", ["first", "last"])
def test_an_empty_tensor_holds_nothing_up(runner: Runner, where: str) -> None:
    # PL-07, NVIDIA/TransformerEngine#3212, pytorch/pytorch#100811
    p, empty = leaf(1.0), leaf([])
    optimizer = Adam([empty, p] if where == "first" else [p, empty], lr=0.1, loss_scale=None, backend=runner.backend)
    train(optimizer, 1.0, 1.0)
    assert p.item() == pytest.approx(0.9)


def test_a_thousand_empty_tensors(runner: Runner) -> None:
    # PL-08, pytorch/pytorch#94865
    p = leaf(1.0)
    params = [*(leaf([]) for _ in range(500)), p, *(leaf([]) for _ in range(500))]
    optimizer = Adam(params, lr=0.1, loss_scale=None, backend=runner.backend)
    train(optimizer, *[1.0] * 1001)
    assert float(optimizer.grad_norm) == pytest.approx(1.0)
    assert p.item() == pytest.approx(0.9)


def test_nothing_but_empty_tensors_is_nothing_to_do(runner: Runner) -> None:
    # PL-08, pytorch/pytorch#94655
    optimizer = Adam([leaf([]) for _ in range(3)], loss_scale=LossScale(8.0), backend=runner.backend)
    train(optimizer, 1.0, 1.0, 1.0)
    assert float(optimizer.grad_norm) == 0.0 and float(optimizer.found_inf) == 0.0
    assert not optimizer.step_was_skipped
    assert scale_and_tracker(optimizer) == (8.0, 0)


@pytest.mark.parametrize("n", [1, 3, 1023, 1024, 1025, 65537])
def test_tails_are_updated_and_counted_once(runner: Runner, n: int) -> None:
    # PL-18
    p = torch.zeros(n).requires_grad_()
    optimizer = SGD([p], lr=1.0, max_norm=1.0, loss_scale=None, backend=runner.backend)
    train(optimizer, 1.0)
    norm = math.sqrt(n)
    assert float(optimizer.grad_norm) == pytest.approx(norm)
    assert [p.min().item(), p.max().item()] == pytest.approx([-1 / (norm + 1e-6)] * 2)


@pytest.mark.parametrize("make", [SGD, Adam])
def test_a_parameter_without_dimensions(runner: Runner, make: Any) -> None:
    # PL-18
    p = leaf(1.0)
    train(make([p], lr=0.1, loss_scale=None, backend=runner.backend), 1.0)
    assert p.item() == pytest.approx(0.9)


# Which tensors take part.


def test_a_parameter_without_gradient_takes_no_part(runner: Runner) -> None:
    # PL-13, NVIDIA/apex#926
    a, b = leaf(1.0), leaf(2.0)
    optimizer = AdamW([a, b], lr=0.1, weight_decay=0.5, loss_scale=None, backend=runner.backend)
    train(optimizer, 1.0, None)
    assert [a.item(), b.item()] == pytest.approx([0.85, 2.0])
    assert not optimizer.state.get(b)
    train(optimizer, 2.0, None)
    assert float(optimizer.grad_norm) == pytest.approx(2.0)


def test_a_parameter_in_two_groups_is_refused() -> None:
    # PL-14, NVIDIA/Megatron-LM#7227
    p = leaf(1.0)
    with pytest.raises(ValueError, match="more than one parameter group"):
        SGD([{"params": [p]}, {"params": [p]}])


def test_a_parameter_named_twice_counts_once(runner: Runner) -> None:
    # PL-14, NVIDIA/Megatron-LM#7228, torch/torch7#716
    p = leaf([0.0, 0.0])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = SGD([p, p], lr=1.0, loss_scale=None, backend=runner.backend)
    p.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert float(optimizer.grad_norm) == pytest.approx(5.0)
    assert p.tolist() == [-3.0, -4.0]


# Kinds.


@pytest.mark.parametrize("make", [SGD, Adam])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_sparse_gradient_is_refused(runner: Runner, make: Any, dtype: torch.dtype) -> None:
    # PL-15, pytorch/pytorch#36786: duplicates whose sum overflows float16
    a, b = leaf([1.0]), torch.ones(3, 2, dtype=dtype).requires_grad_()
    optimizer = make([a, b], lr=0.1, loss_scale=None, backend=runner.backend)
    a.grad = torch.ones(1)
    b.grad = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.full((2, 2), 60000.0, dtype=dtype), (3, 2), check_invariants=True
    )
    with pytest.raises(RuntimeError, match=r"parameter 1 \(shape \(3, 2\).*sparse"):
        optimizer.step()
    assert a.tolist() == [1.0] and b.min().item() == b.max().item() == 1.0
    assert not optimizer.state


@pytest.mark.parametrize("amsgrad", [False, True])
def test_complex_parameters_are_pairs_of_reals(runner: Runner, amsgrad: bool) -> None:
    # PL-16, pytorch/pytorch#59998, pytorch/pytorch#104990
    z = leaf(0j, grad=3 + 4j, dtype=torch.complex64)
    Adam([z], lr=0.1, amsgrad=amsgrad, loss_scale=None, backend=runner.backend).step()
    assert [z.real.item(), z.imag.item()] == pytest.approx([-0.1, -0.1])


@pytest.mark.parametrize(
    "make", [SGD, lambda *args, **options: AdamW(*args, weight_decay=0.0, **options)], ids=["SGD", "AdamW"]
)
def test_a_gradient_in_another_dtype_than_its_parameter(runner: Runner, make: Any) -> None:
    # PL-17, NVIDIA/TransformerEngine#3358, pytorch/pytorch#191925
    p = leaf(1.0)
    p.grad_dtype = torch.bfloat16  # type: ignore[attr-defined]
    train(make([p], lr=0.1, loss_scale=None, backend=runner.backend), 1.0)
    assert p.grad is not None and p.grad.dtype == torch.bfloat16
    assert p.item() == pytest.approx(0.9)


FLOATS = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64}


@pytest.mark.parametrize(
    ("old", "new"), [("float", "half"), ("float", "bfloat16"), ("half", "float"), ("float", "double")]
)
def test_a_model_may_be_cast_between_steps(runner: Runner, old: str, new: str) -> None:
    # PL-19, Lightning-AI/pytorch-lightning#16303
    model = torch.nn.ParameterList([torch.ones(3, dtype=FLOATS[old])])
    optimizer = Adam(model.parameters(), lr=0.125, loss_scale=None, backend=runner.backend)
    train(optimizer, 1.0)
    getattr(model, new)()
    train(optimizer, 1.0)
    (p,) = params_of(optimizer)
    assert p.dtype == FLOATS[new]
    assert p.tolist() == pytest.approx([0.75] * 3)
    state = optimizer.state[p]
    assert {state["exp_avg"].dtype, state["exp_avg_sq"].dtype} == {torch.float64 if new == "double" else torch.float32}
    assert state["exp_avg"].tolist() == pytest.approx([0.19] * 3)
    assert steps_of(optimizer) == [2]
