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


def test_what_is_the_same_is_not_looked_at_again() -> None:
    known = Facts([torch.zeros(3)])
    has_guards = hasattr(torch._C._dynamo.guards, "TensorGuards")
    assert (known.again([torch.ones(3)]) is known) == has_guards


def test_empty_tensors_and_what_is_put_off_are_known() -> None:
    plain, empty = torch.zeros(3, dtype=torch.complex64), torch.zeros(0)
    assert not Facts([plain]).has_empty
    assert Facts([plain, empty]).has_empty
    assert not Facts([plain, empty]).are_put_off
    assert Facts([plain, plain.conj()]).are_put_off
    assert Facts([plain.conj().imag]).are_put_off


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
