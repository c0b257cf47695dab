"""Mutants: functions of ours with a few words of their source replaced."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def mutate(
    monkeypatch: pytest.MonkeyPatch, folder: Path, modules: list[ModuleType], name: str, edits: Mapping[str, str]
) -> None:
    """Put a mutant of a function in its place, wherever one of the modules has it by itself or in a table of rules.

    A jitted function is decorated anew, so that the kernels have to be interpreted, where every call looks its
    functions up.

    Args:
        monkeypatch: undoes it.
        folder: where the source goes: decorators want to read it.
        modules: the ones that are searched; the first that defines the function is its home.
        name: of the function, ``"Class.name"`` of a method.
        edits: what is replaced in its source, by what. Each has to be there, or there would be no mutant.
    """
    class_name, _, name = name.rpartition(".")
    home = next(module for module in modules if _defines(module, class_name or name))
    owner = getattr(home, class_name) if class_name else home
    original = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(getattr(original, "fn", original)))
    for old, new in edits.items():
        assert old in source, f"{name} has no {old!r} any more: mend the mutant"
        source = source.replace(old, new)
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


def _defines(module: ModuleType, name: str) -> bool:
    function = getattr(module, name, None)
    return getattr(getattr(function, "fn", function), "__module__", None) == module.__name__


def _replaced(value: Any, old: Any, new: Any) -> Any:
    """The value with ``old`` replaced; the value itself if that is nowhere in it."""
    if value is old:
        return new
    if isinstance(value, tuple) and any(item is old for item in value):
        return tuple(new if item is old else item for item in value)
    if isinstance(value, dict) and any(isinstance(v, tuple) and any(i is old for i in v) for v in value.values()):
        return {key: _replaced(item, old, new) for key, item in value.items()}
    return value
