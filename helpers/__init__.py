"""The course's own package: checks, progress, widgets, plots, devices and data."""


def __getattr__(name: str) -> object:
    """Raise ImportError for the two names that have moved to the library."""
    if name in ("vgpu", "launch"):
        new = "import vgpu" if name == "vgpu" else "from vgpu import launch"
        raise ImportError(f"helpers.{name} is now in the library: write {new}")
    raise AttributeError(f"module 'helpers' has no attribute {name!r}")
