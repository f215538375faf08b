"""The course's own package: checks, progress, widgets, plots, devices and data."""

_MOVED = {
    "launch": "from vgpu import launch",
    "vgpu": "import vgpu",
}


def __getattr__(name: str) -> object:
    if name in _MOVED:
        raise ImportError(f"helpers.{name} is a library of its own now; write: {_MOVED[name]}")
    raise AttributeError(f"module 'helpers' has no attribute {name!r}")
