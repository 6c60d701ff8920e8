"""Write the source archive: our own files only, since upstream enters when a wheel is built.

Owners, dates and modes are fixed, so that two builds of one commit are the same file.
"""

import gzip
import io
import tarfile
from pathlib import Path

from . import series
from .project import ROOT, load

_FILES = ("pyproject.toml", "upstream.txt", "constraints.txt", "LICENSE", "NOTICE")
_DATE = 315532800  # 1980-01-01, as in the wheel


def build(folder: Path) -> str:
    """Write the archive into `folder` and return its file name."""
    version = load().version
    base = f"sglang-{version}"
    info = (
        f"Metadata-Version: 2.2\nName: sglang\nVersion: {version}\n"
        "Dynamic: Requires-Dist\nDynamic: Provides-Extra\n"
    )
    content = {name: (ROOT / name).read_bytes() for name in _FILES}
    content |= {file.relative_to(ROOT).as_posix(): file.read_bytes() for file in _sources()}
    content["PKG-INFO"] = info.encode()
    with (
        (folder / f"{base}.tar.gz").open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=_DATE) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name, data in sorted(content.items()):
            entry = tarfile.TarInfo(f"{base}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), _DATE, 0o644
            tar.addfile(entry, io.BytesIO(data))
    return f"{base}.tar.gz"


def _sources() -> list[Path]:
    backend = sorted((ROOT / "build_backend").rglob("*.py"))
    patches = [series.PATCHES / "series", *(series.PATCHES / name for name in series.names())]
    return [*backend, *patches, *series.overlay().values()]
