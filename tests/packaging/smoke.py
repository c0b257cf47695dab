"""Train a step on the CPU and load the kernels: what an installed tritonamp must be able to do.

Run with ``python -I``, so that neither the working directory nor the checkout is on the import path.
"""

import importlib.util
import sys
from pathlib import Path

import torch

import tritonamp

site = Path(tritonamp.__file__).parent
assert site.is_relative_to(sys.prefix), f"tritonamp comes from {site}, outside of {sys.prefix}"
assert (site / "py.typed").is_file()

weight = torch.nn.Parameter(torch.ones(5))
optimizer = tritonamp.AdamW([weight], lr=0.1, max_norm=1.0)
optimizer.backward((weight**2).sum())
optimizer.step()
assert (weight < 1).all()
assert not optimizer.step_was_skipped

if importlib.util.find_spec("triton"):
    import tritonamp.kernels

    assert Path(tritonamp.kernels.__file__).is_relative_to(site)
print(f"tritonamp {tritonamp.__version__} works from {site}")
