"""The loss scale's rule, against torch's and on its own."""

import math

import pytest
import torch

from tritonamp.testing.reference import TorchReference
from tritonamp.testing.scale import ScaleState, next_scale


def test_the_scale_follows_torch_over_an_overflow() -> None:
    """neosr-project/neosr#9: the tracker advances once per step."""
    scale = ScaleState(scale=8.0, growth_interval=3)
    reference = TorchReference(torch.optim.SGD, [torch.zeros(1)], scale=scale, lr=0.1)
    seen = []
    for value in [1, 1, math.inf, 1, 1, 1, 1, 1, 1, math.inf, 1]:
        scale = next_scale(scale, math.isinf(value))
        assert reference.step([torch.tensor([float(value)])]).scale == scale
        seen.append((scale.scale, scale.growth_tracker))
    assert seen == [(8, 1), (8, 2), (4, 0), (4, 1), (4, 2), (8, 0), (8, 1), (8, 2), (16, 0), (8, 0), (8, 1)]


@pytest.mark.parametrize(
    ("state", "found_inf", "scale", "tracker"),
    [
        # One rounding to float32, of the float64 product.
        (ScaleState(3.0, growth_factor=1.1, growth_interval=1), False, 3.299999952316284, 0),
        (ScaleState(150.0, backoff_factor=0.75), True, 112.5, 0),
        # pytorch/pytorch#98828: a growth to infinity is not taken.
        (ScaleState(2.0**127, growth_interval=1), False, 2.0**127, 0),
        # A tracker past a smaller, newly loaded interval.
        (ScaleState(8.0, growth_interval=3, growth_tracker=7), False, 16.0, 0),
        (ScaleState(8.0, growth_interval=1, max_scale=10.0), False, 10.0, 0),
        # tensorflow/tensorflow#38357: no floor at 1.
        (ScaleState(1.0), True, 0.5, 0),
        (ScaleState(1.0, min_scale=1.0, growth_tracker=5), True, 1.0, 0),
        (ScaleState(8.0), math.nan, 4.0, 0),
        (ScaleState(8.0), 2.0, 4.0, 0),
    ],
)
def test_next_scale(state: ScaleState, found_inf: float, scale: float, tracker: int) -> None:
    after = next_scale(state, found_inf)
    assert (after.scale, after.growth_tracker) == (scale, tracker)


def test_hysteresis_backs_off_from_the_nth_overflow_since_the_last_good_step() -> None:
    state = ScaleState(64.0, hysteresis=2, growth_interval=100)
    scales = []
    for found_inf in [1, 1, 1, 0, 1, 0, 1, 1]:
        state = next_scale(state, found_inf)
        scales.append(state.scale)
    assert scales == [64, 32, 16, 16, 16, 16, 16, 8]


def test_a_scale_state_travels_through_torchs_state_dict() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    assert ScaleState.from_state_dict(scaler.state_dict()) == ScaleState(8.0, growth_interval=3)


def test_the_reference_refuses_what_torch_has_not() -> None:
    with pytest.raises(ValueError, match="no bounds and no hysteresis"):
        TorchReference(torch.optim.SGD, [torch.ones(1)], scale=ScaleState(hysteresis=2))
