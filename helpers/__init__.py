"""The course's own package: checks, progress, widgets, plots, devices and data."""


def __getattr__(name: str) -> object:
    """ImportError for the two names that old code imports; the library has them now."""
    if name in ("vgpu", "launch"):
        new = "import vgpu" if name == "vgpu" else "from vgpu import launch"
        raise ImportError(f"helpers.{name} is in the library now: write {new}")
    raise AttributeError(f"module 'helpers' has no attribute {name!r}")
