"""The snippets of docs/testing.md run as they are."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
from conftest import IS_INTERPRETED

TEXT = (Path(__file__).parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
TOOLS, FAULTS = (re.findall(r"```python\n(.*?)```", part, re.DOTALL) for part in TEXT.split("## Faults found in torch"))


def run(snippet: str, directory: Path) -> None:
    # From a file: Triton reads a kernel's source.
    path = directory / "snippet.py"
    path.write_text(snippet, encoding="utf-8")
    runpy.run_path(str(path))


@pytest.mark.parametrize("snippet", TOOLS, ids=range(len(TOOLS)))
def test_snippets_run(snippet: str, tmp_path: Path) -> None:
    if "concurrent_interpreter" in snippet and not IS_INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1")
    run(snippet, tmp_path)


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="about faults of torch 2.13")
@pytest.mark.parametrize("snippet", FAULTS, ids=range(len(FAULTS)))
def test_faults_of_torch_are_there(snippet: str, tmp_path: Path) -> None:
    run(snippet, tmp_path)
