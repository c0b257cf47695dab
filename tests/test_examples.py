"""The examples run, and say by their exit status whether they have trained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.compiled
def test_digits_agrees_with_torch(tmp_path: Path) -> None:
    done = run("digits.py", "--plot", "plot.png", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.compiled
def test_digits_fails_where_the_training_is_no_good(tmp_path: Path) -> None:
    done = run("digits.py", "--epochs", "1", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "95 % were expected" in done.stdout


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--epochs", "0"), "--epochs must be at least 1, got 0"),
        (("--optimizer", "lion"), "invalid choice: 'lion'"),
        (("--device", "abacus"), "cannot use 'abacus'"),
    ],
    ids=["epochs", "optimizer", "device"],
)
def test_digits_names_a_bad_argument(arguments: tuple[str, str], message: str, tmp_path: Path) -> None:
    done = run("digits.py", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


FRAMEWORKS = ["accelerate_digits.py", "trainer_tiny.py", "lightning_digits.py"]

WITHOUT_STEPS = """
import runpy, sys, tritonamp
tritonamp.AdamW.step = lambda self, closure=None: None if closure is None else closure()
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.compiled
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_frameworks_train(name: str, tmp_path: Path) -> None:
    done = run(name, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.compiled
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_frameworks_tell_where_the_training_is_no_good(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_STEPS, str(EXAMPLES / name)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Error" not in done.stderr, done.stdout + done.stderr
