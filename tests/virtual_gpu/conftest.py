"""The tests of the virtual GPU."""

import pytest


@pytest.fixture(autouse=True)
def fusion_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.9 warns where kernels rely on its default, as most of the tests' do."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
