"""The tree in the docstring of aiokv.errors is the tree of its classes."""

from __future__ import annotations

import inspect
import re

import pytest

from aiokv import errors

BRANCH = re.compile(r"^(?P<indent>[ |]*)\+-- (?P<name>\w+) .*?(?:\((?P<builtin>\w+)\))?$")


def drawn() -> dict[str, tuple[str, str | None]]:
    """Each class in the docstring, with its parent and the built-in kind it also is."""
    assert errors.__doc__ is not None
    tree: dict[str, tuple[str, str | None]] = {}
    path = [(-1, "AiokvError")]
    for line in errors.__doc__.splitlines():
        if branch := BRANCH.match(line.removeprefix("    ")):
            indent = len(branch["indent"])
            while path[-1][0] >= indent:
                path.pop()
            tree[branch["name"]] = path[-1][1], branch["builtin"]
            path.append((indent, branch["name"]))
    return tree


def defined() -> dict[str, tuple[str, str | None]]:
    """The same from the classes."""
    tree: dict[str, tuple[str, str | None]] = {}
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if kind is errors.AiokvError:
            continue
        parent, *builtins = kind.__bases__
        tree[name] = parent.__name__, builtins[0].__name__ if builtins else None
    return tree


def test_docstring_is_the_tree() -> None:
    assert drawn() == defined()


def test_every_class_is_public() -> None:
    assert set(errors.__all__) == {"AiokvError", *defined()}


@pytest.mark.parametrize("name", errors.__all__)
def test_message_survives(name: str) -> None:
    """No built-in base (OSError reads its arguments) gets between an error and its message."""
    assert str(getattr(errors, name)("decode-1: 3 of 32 layers")) == "decode-1: 3 of 32 layers"
