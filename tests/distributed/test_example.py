"""The example trains on two processes, and says by its exit status whether it has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2_digits.py"

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.compiled]


@pytest.mark.parametrize(
    ("epochs", "message"), [(20, "All processes agree."), (1, "95 % were expected")], ids=["good", "too-short"]
)
def test_fsdp2_digits(epochs: int, message: str, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, str(EXAMPLE), "--epochs", str(epochs)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert message in done.stdout, done.stdout + done.stderr
    assert (done.returncode == 0) == (epochs == 20)
