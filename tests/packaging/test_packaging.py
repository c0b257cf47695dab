"""What is installed: every module and nothing else, and no import that a user's process need not have."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {"tritonamp": ROOT / "tritonamp", "tritonamp.kernels": ROOT / "kernels"}

TRAIN = """
import torch, tritonamp
weight = torch.nn.Parameter(torch.ones(5))
for make in (tritonamp.SGD, tritonamp.Adam, tritonamp.AdamW):
    optimizer = make([weight], lr=0.1, max_norm=1.0)
    before = weight.detach().clone()
    optimizer.backward((weight**2).sum())
    optimizer.step()
    assert (weight < before).all()
"""

WITHOUT_TRITON = """
import sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")

sys.meta_path.insert(0, NoTriton())
"""


def python(code: str, cwd: Path, **environment: str) -> str:
    """Run code in a fresh process outside of the checkout and return what it prints.

    Coverage's variables would make it import coverage; ``PYTHONPATH`` could bring the checkout back.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COV_", "PYTHON", "TRITON"))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=cwd, env=kept | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def source_files() -> dict[str, Path]:
    """Map every file's path in the wheel to its path in the checkout."""
    return {
        f"{package.replace('.', '/')}/{path.relative_to(folder).as_posix()}": path
        for package, folder in SOURCES.items()
        for path in folder.rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # From a copy: setuptools leaves its traces where it builds, and takes those of older builds into the wheel.
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in SOURCES.values():
        shutil.copytree(folder, copy / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (copy / "dist").glob("*.whl")
    return path


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    # A sub-package that pyproject.toml does not list is left out without a word.
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert files == set(source_files())
        assert "tritonamp/py.typed" in files
        assert all(archive.read(name) == path.read_bytes() for name, path in source_files().items())


def test_an_installed_wheel_brings_its_kernels_and_no_other_top_level_name(wheel: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(tmp_path), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == {"tritonamp"}
    code = "import tritonamp.kernels; print(tritonamp.__file__, tritonamp.kernels.__file__, sep='\\n')"
    files = python(code, tmp_path.parent, PYTHONPATH=str(tmp_path)).splitlines()
    assert [Path(file).relative_to(tmp_path).as_posix() for file in files] == [
        "tritonamp/__init__.py",
        "tritonamp/kernels/__init__.py",
    ]


def test_the_kernels_are_importable_under_our_name_only(tmp_path: Path) -> None:
    # `kernels` is another project's import name.
    code = """
import importlib.util, tritonamp.kernels
print(tritonamp.kernels.__file__)
other = importlib.util.find_spec("kernels")
print(other and other.origin)
"""
    ours, other = python(code, tmp_path).splitlines()
    assert Path(ours) != Path(other)
    assert not Path(other).is_relative_to(ROOT)


def test_training_on_the_cpu_works_without_triton(tmp_path: Path) -> None:
    python(WITHOUT_TRITON + TRAIN, tmp_path)


def test_importing_it_imports_neither_triton_nor_hypothesis_and_starts_no_gpu(tmp_path: Path) -> None:
    code = """
import sys, torch, tritonamp, tritonamp.testing.laws
print(*sorted({"triton", "hypothesis"} & set(sys.modules)))
assert not torch.cuda.is_initialized()
"""
    assert python(code, tmp_path) == ""


def test_training_on_the_cpu_loads_no_kernels_and_starts_no_gpu(tmp_path: Path) -> None:
    # torch's optimizer base class imports triton itself, where there is one.
    code = f"""
import sys, torch
{TRAIN}
print(*sorted({{"tritonamp.kernels", "hypothesis"}} & set(sys.modules)))
assert not torch.cuda.is_initialized()
"""
    assert python(code, tmp_path) == ""
