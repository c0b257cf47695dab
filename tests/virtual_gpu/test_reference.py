"""Compiled kernels on the virtual GPU and Triton's interpreter agree."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from virtual_gpu import kernels

from tritonamp.testing.virtual_gpu import virtual_gpu

pytestmark = pytest.mark.compiled

LOOSE = {"exp": 1e-5, "sigmoid": 1e-6, "erf": 1e-6, "softmax": 1e-5, "sum": 1e-5, "scan": 3e-5}


def test_interpreter_agrees(tmp_path: Path) -> None:
    path = tmp_path / "reference.pt"
    # It is decided when a kernel is defined whether it is interpreted: in another process.
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, kernels.__file__, path], check=True, env=environment)
    want = torch.load(path)
    with virtual_gpu(90) as stats:
        got = kernels.reference_run()
    assert want.keys() == got.keys() and len(stats.launches) == len(got)
    for name, value in got.items():
        if value.dtype.is_floating_point:
            atol = 1e-5 if name == "scan" else 1e-6
            torch.testing.assert_close(value, want[name], rtol=LOOSE.get(name, 3e-7), atol=atol)
        else:
            assert torch.equal(value, want[name]), name
