"""Write our wheel from upstream's: the same archive with some members changed and some added.

Members that are not changed keep upstream's date and RECORD row; all others get one fixed date
and mode, so that two builds of one commit are the same file. An editable wheel carries only the
dist-info and a .pth line that points at build/tree.
"""

import base64
import csv
import hashlib
import io
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import series, tree, upstream
from .metadata import licences, metadata
from .project import Project, load, version_module

_DATE = (1980, 1, 1, 0, 0, 0)
_MODE = 0o100644 << 16
_Row = tuple[str, str, str]


@dataclass(frozen=True, kw_only=True)
class Member:
    """One file of the wheel to be written."""

    path: str
    data: bytes
    like: zipfile.ZipInfo | None = None
    """Upstream's entry, when date and mode are kept from it."""
    row: _Row | None = None
    """Upstream's RECORD row, when the bytes are upstream's."""


def build(folder: Path, *, editable: bool) -> str:
    """Write the wheel into `folder` and return its file name."""
    project, source = load(), upstream.fetch()
    name = source.name.replace(f"-{project.base}-", f"-{project.version}-", 1)
    # Written beside its final place, so a build that fails leaves no half wheel there.
    part = folder / f"{name}.part"
    try:
        with zipfile.ZipFile(source) as zin:
            chosen = _editable(zin, project) if editable else _complete(zin, project)
            _write(part, chosen, f"{_info(project.version)}RECORD")
        os.replace(part, folder / name)
    finally:
        part.unlink(missing_ok=True)
    return name


def dist_info(project: Project) -> list[Member]:
    """The dist-info files but RECORD, for prepare_metadata_* hooks."""
    with zipfile.ZipFile(upstream.fetch()) as zin:
        return list(_dist_info(zin, project))


def _info(version: str) -> str:
    return f"sglang-{version}.dist-info/"


def _dist_info(zin: zipfile.ZipFile, project: Project) -> Iterator[Member]:
    old, new = _info(project.base), _info(project.version)
    for entry in zin.infolist():
        name = entry.filename.removeprefix(old)
        if name == entry.filename or name.endswith("/") or name in ("", "RECORD"):
            continue
        data = zin.read(entry)
        yield Member(path=new + name, data=metadata(data, project) if name == "METADATA" else data)
    for name, data in licences(project).items():
        yield Member(path=f"{new}licenses/{name}", data=data)


def _complete(zin: zipfile.ZipFile, project: Project) -> Iterator[Member]:
    ours = series.require_only_new(zin.namelist())
    changed = series.patched(zin.read)
    changed["sglang/_version.py"] = version_module(project.version)
    # Upstream has file names with commas, so RECORD is read as the CSV it is.
    record = io.StringIO(zin.read(f"{_info(project.base)}RECORD").decode())
    rows = {row[0]: (row[0], row[1], row[2]) for row in csv.reader(record)}
    for entry in zin.infolist():
        path = entry.filename
        if path.endswith("/") or path.startswith(_info(project.base)):
            continue
        if path in changed:
            yield Member(path=path, data=changed[path])
        else:
            yield Member(path=path, data=zin.read(entry), like=entry, row=rows[path])
    for path, file in ours.items():
        yield Member(path=path, data=file.read_bytes())
    yield from _dist_info(zin, project)


def _editable(zin: zipfile.ZipFile, project: Project) -> Iterator[Member]:
    root = tree.materialise()
    tree.add_extension_modules(zin)
    yield Member(path="_sglang_editable.pth", data=f"{root / 'python'}\n".encode())
    yield from _dist_info(zin, project)


def _write(out: Path, members: Iterator[Member], record: str) -> None:
    rows: list[_Row] = []
    with zipfile.ZipFile(out, "w") as zout:
        for member in members:
            _add(zout, member)
            rows.append(member.row or _row(member))
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*rows, (record, "", "")])
        _add(zout, Member(path=record, data=text.getvalue().encode()))


def _add(zout: zipfile.ZipFile, member: Member) -> None:
    entry = zipfile.ZipInfo(member.path, member.like.date_time if member.like else _DATE)
    entry.external_attr = member.like.external_attr if member.like else _MODE
    entry.create_system = 3  # Unix, so that the mode is read on every platform
    # Level 1: the extension modules dominate, and the wheel is unpacked at once.
    zout.writestr(entry, member.data, zipfile.ZIP_DEFLATED, compresslevel=1)


def _row(member: Member) -> _Row:
    digest = base64.urlsafe_b64encode(hashlib.sha256(member.data).digest()).rstrip(b"=").decode()
    return member.path, f"sha256={digest}", str(len(member.data))
