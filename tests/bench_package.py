"""Makes ``bench/``, which is not installed, importable; skips what imports this where rich is missing.

The checkout's root must not be on the path for it: ``kernels`` would be importable, and that name is not ours.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

_INIT = Path(__file__).parents[1] / "bench" / "__init__.py"

if "bench" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("bench", _INIT, submodule_search_locations=[str(_INIT.parent)])
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules["bench"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["bench"])
