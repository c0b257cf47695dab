"""Mutants: functions of ours with a few words of their source replaced."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import shutil
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tritonamp import kernels


def mutate(
    monkeypatch: pytest.MonkeyPatch, folder: Path, modules: list[ModuleType], name: str, edits: Mapping[str, str]
) -> None:
    """Put a mutant of a function in its place, wherever one of the modules has it by itself or in a table of rules.

    Args:
        monkeypatch: undoes it.
        folder: where the source goes, for tracebacks to show.
        modules: the ones that are searched; the first that defines the function is its home.
        name: of the function, ``"Class.name"`` of a method.
        edits: what is replaced in its source, by what. Each has to be there, or there would be no mutant.
    """
    class_name, _, name = name.rpartition(".")
    home = next(module for module in modules if _defines(module, class_name or name))
    owner = getattr(home, class_name) if class_name else home
    original = getattr(owner, name)
    source = _edited(name, textwrap.dedent(inspect.getsource(original)), edits)
    file = folder / f"{name}.py"
    file.write_text(f"from __future__ import annotations\n\n\n{source}", encoding="utf-8")
    # By another name, lest its lines count as ours in reports of coverage.
    names: dict[str, Any] = {**vars(home), "__name__": f"mutant_of_{home.__name__}"}
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), names)
    if class_name:
        monkeypatch.setattr(owner, name, names[name])
        return
    for module in modules:
        for key, value in list(vars(module).items()):
            changed = _replaced(value, original, names[name])
            if changed is not value:
                monkeypatch.setattr(module, key, changed)


def mutate_kernels(
    monkeypatch: pytest.MonkeyPatch, folder: Path, user: ModuleType, name: str, edits: Mapping[str, str]
) -> None:
    """Let a module use a copy of all kernels in which one jitted function is a mutant.

    A jitted function remembers the code of all that it calls: a mutant among the originals would not be noticed.

    Args:
        monkeypatch: undoes it.
        folder: where the copy goes.
        user: the module; whatever it has imported from the kernels is replaced.
        name: of the function.
        edits: as for :func:`mutate`.
    """
    modules = [importlib.import_module(f"{kernels.__name__}.{m.name}") for m in pkgutil.iter_modules(kernels.__path__)]
    home = next(module for module in modules if _defines(module, name))
    package = f"mutant_{folder.name}"
    shutil.copytree(Path(kernels.__path__[0]), folder / package)
    file = folder / package / Path(str(home.__file__)).name
    text, source = file.read_text(encoding="utf-8"), inspect.getsource(getattr(home, name).fn)
    assert source in text
    file.write_text(text.replace(source, _edited(name, source, edits)), encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    for key, value in list(vars(user).items()):
        of = value.__name__ if isinstance(value, ModuleType) else _module(value)
        if of.startswith(f"{kernels.__name__}."):
            copy = importlib.import_module(of.replace(kernels.__name__, package, 1))
            monkeypatch.setattr(user, key, copy if isinstance(value, ModuleType) else getattr(copy, key))


def _edited(name: str, source: str, edits: Mapping[str, str]) -> str:
    for old, new in edits.items():
        assert old in source, f"{name} has no {old!r} any more: mend the mutant"
        source = source.replace(old, new)
    return source


def _module(function: Any) -> str:
    """Name of the module that defines it; of a jitted function, too."""
    return str(getattr(getattr(function, "fn", function), "__module__", None))


def _defines(module: ModuleType, name: str) -> bool:
    return _module(getattr(module, name, None)) == module.__name__


def _replaced(value: Any, old: Any, new: Any) -> Any:
    """The value with ``old`` replaced; the value itself if that is nowhere in it."""
    if value is old:
        return new
    if isinstance(value, tuple) and any(item is old for item in value):
        return tuple(new if item is old else item for item in value)
    if isinstance(value, dict) and any(isinstance(v, tuple) and any(i is old for i in v) for v in value.values()):
        return {key: _replaced(item, old, new) for key, item in value.items()}
    return value
