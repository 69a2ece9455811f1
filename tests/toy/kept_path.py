"""Paths that are made once: half of what a simulated run costs would be the making of paths."""

from __future__ import annotations

from pathlib import Path, PosixPath


class KeptPath(PosixPath):
    """A path that keeps its parent, and what lies below it, once they were asked for."""

    __slots__ = ("_kept_below", "_kept_parent")

    def __truediv__(self, name: object) -> Path:  # type: ignore[override]
        try:
            below = self._kept_below
        except AttributeError:
            below = self._kept_below = dict[object, Path]()
        path = below.get(name)
        if path is None:
            path = below[name] = super().__truediv__(name)  # type: ignore[operator]
        return path

    @property
    def parent(self) -> Path:  # type: ignore[override]
        try:
            return self._kept_parent
        except AttributeError:
            self._kept_parent = super().parent
            return self._kept_parent
