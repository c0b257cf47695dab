"""What tests of optimizers need: an oracle, torch's own step as a reference, a concurrent interpreter.

Importing this package imports torch, but neither Triton nor Hypothesis.
"""

from tritonamp.testing.bounds import Bounded, Format, assert_within
from tritonamp.testing.interpreter import GridDeadlockError, Launch, LaunchLog, concurrent_interpreter
from tritonamp.testing.oracle import Expectation, Step, expect, step
from tritonamp.testing.reference import Outcome, TorchReference
from tritonamp.testing.scale import ScaleState, next_scale

__all__ = [
    "Bounded",
    "Expectation",
    "Format",
    "GridDeadlockError",
    "Launch",
    "LaunchLog",
    "Outcome",
    "ScaleState",
    "Step",
    "TorchReference",
    "assert_within",
    "concurrent_interpreter",
    "expect",
    "next_scale",
    "step",
]
