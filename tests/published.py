"""Check of an installed wheel: it has types and license, and no tests.

`.ci/run` builds it and runs this with nothing but the wheel on the path.
"""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path


def check() -> None:
    import lightning_cudagraph

    root = Path(lightning_cudagraph.__file__).parent
    found = distribution("lightning_cudagraph")
    assert Path(str(found.locate_file("lightning_cudagraph"))) == root, "another copy was imported"
    names = {str(file) for file in found.files or []}
    assert "lightning_cudagraph/py.typed" in names
    assert "lightning_cudagraph/device/streams/checked_ops.txt" in names
    assert any(name.endswith("LICENSE") for name in names)
    rooms = {name.partition("/")[0] for name in names}
    assert {room for room in rooms if not room.endswith(".dist-info") and room != ".."} <= {
        "lightning_cudagraph",
        "bin",
    }, rooms
    assert lightning_cudagraph.__version__ == found.version
    lightning_cudagraph.CUDAGraphCallback(timings=lightning_cudagraph.LayerTimings())
    print(f"lightning_cudagraph {found.version}: {len(names)} files")


if __name__ == "__main__":
    check()
