"""What is compared at every step before anything is taken for unchanged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tritonamp
from tritonamp import facts
from tritonamp.facts import Facts

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "dtype": lambda tensor: tensor.to(torch.complex128),
    "shape": lambda tensor: tensor[:2],
    "strides": lambda tensor: tensor.t().contiguous().t(),
    "device": lambda tensor: tensor.to("meta"),
    "conjugation": torch.conj,
    "negation": torch._neg_view,
}


@pytest.fixture(params=["guarded", "unguarded"])
def _with_or_without_guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a torch that has no such guards any more."""
    if request.param == "unguarded":
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")


pytestmark = pytest.mark.usefixtures("_with_or_without_guards")


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    one, other = torch.zeros(4, dtype=torch.complex64), torch.zeros(3, 3, dtype=torch.complex64)
    known = Facts([one, other])
    assert known.again([one, CHANGES[change](other)]).of_each != known.of_each
    assert known.again([one.clone(), other.clone()]).of_each == known.of_each
    assert known.again([one]).of_each == known.of_each[:1]


def test_a_shape_of_as_many_elements_and_the_same_strides_is_another() -> None:
    memory = torch.zeros(32)
    known = Facts([memory.as_strided((6, 2), (1, 6))])
    assert known.again([memory.as_strided((4, 3), (1, 6))]).of_each != known.of_each


def test_a_sparse_tensor_is_no_expanded_one() -> None:
    """Its strides are 0, too."""
    known = Facts([torch.zeros(1).expand(3)])
    assert known.again([torch.zeros(3).to_sparse()]).of_each != known.of_each


@pytest.mark.parametrize("bit", ["conjugation", "negation"])
def test_a_lazy_tensor_has_the_strides_that_it_is_going_to_have(bit: str) -> None:
    lazy = CHANGES[bit](torch.zeros(3, 6, dtype=torch.complex64)[:, ::2])
    assert Facts([lazy]).of_each[0][-1] == lazy.resolve_conj().resolve_neg().stride() != lazy.stride()


def test_what_is_the_same_is_not_looked_at_again() -> None:
    known = Facts([torch.zeros(3)])
    has_guards = hasattr(torch._C._dynamo.guards, "TensorGuards")
    assert (known.again([torch.ones(3)]) is known) == has_guards


def test_empty_and_lazy_tensors_are_known() -> None:
    plain, empty = torch.zeros(3, dtype=torch.complex64), torch.zeros(0)
    assert not Facts([plain]).has_empty
    assert Facts([plain, empty]).has_empty
    assert not Facts([plain, empty]).has_lazy
    assert Facts([plain, plain.conj()]).has_lazy
    assert Facts([plain.conj().imag]).has_lazy


def test_guards_that_take_other_arguments_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", lambda *tensors: None, raising=False)
    known = facts.Facts([torch.zeros(3)])
    again = known.again([torch.ones(3)])
    assert again is not known
    assert again.of_each == known.of_each


@pytest.mark.parametrize("key", ["step", "exp_avg"])
def test_state_of_another_dtype_at_the_same_address_is_brought_into_form(key: str) -> None:
    param = torch.zeros(4, requires_grad=True)
    opt = tritonamp.AdamW([param], loss_scale=None, backend="torch")
    for _ in range(2):
        param.grad = torch.ones(4)
        opt.step()
    state = opt.state[param][key]
    state.data = state.data.view(torch.int32)  # as if it had been made anew where the old one was
    opt.step()
    assert opt.state[param][key].dtype == torch.float32
