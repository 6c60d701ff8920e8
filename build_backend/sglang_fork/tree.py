"""The tree to edit in: build/tree, a throw-away git repository.

Its first commit is upstream, then one commit a patch; overlay files are symlinks into python/,
so an edit of them is an edit in this repository. A stamp records the state in which tree and
patches/ last agreed: whichever of the two has changed since is the one to follow, and if both
have, nothing is overwritten.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from . import series, upstream
from .errors import TreeError
from .gitrun import IDENTITY, Git
from .project import BUILD, PIN, ROOT, load, version_module

TREE = BUILD / "tree"
EXCLUDE = "__pycache__/\n*.so\n/python/sglang/_version.py\n"
_HEADING = re.compile(r"^(@@ -[0-9,]+ \+[0-9,]+ @@).*$", re.M)

git = Git(folder=TREE)


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """The state in which build/tree and patches/ last agreed."""

    pin: str
    """Text of upstream.txt."""
    series: str
    """Digest of patches/."""
    head: str
    """Commit of build/tree."""
    links: tuple[str, ...]
    """Overlay symlinks in build/tree."""


def materialise() -> Path:
    """Bring build/tree up to date with patches/ and the overlay, and return it.

    Called by an editable build and by every command. Commits made in build/tree since the last
    refresh are kept; TreeError if patches/ or the pin changed as well.
    """
    BUILD.mkdir(exist_ok=True)
    with _locked(), zipfile.ZipFile(upstream.fetch(any_python=True)) as wheel:
        series.require_only_new(wheel.namelist())
        stamp = _read_stamp()
        current = (PIN.read_text(), series.digest())
        if stamp is None or (stamp.pin, stamp.series) != current:
            series.patched(wheel.read)  # the strict applier names a misfit better than git am
            if stamp is not None:
                _require_no_own_work(stamp)
            if stamp is None or stamp.pin != current[0]:
                _unpack(wheel)
            _replay()
        (TREE / "python/sglang/_version.py").write_bytes(version_module(load().version))
        links = _link_overlay(stamp.links if stamp else ())
        agreed = stamp is not None and (stamp.pin, stamp.series) == current
        head = stamp.head if stamp is not None and agreed else git("rev-parse", "HEAD").strip()
        _write_stamp(Stamp(pin=current[0], series=current[1], head=head, links=links))
    return TREE


def add_extension_modules(wheel: zipfile.ZipFile) -> None:
    """Unpack the extension modules of this interpreter's wheel where they are missing.

    Their names carry the Python version, so those for several versions live side by side.
    """
    for name in wheel.namelist():
        if name.endswith(".so") and not (TREE / "python" / name).exists():
            wheel.extract(name, TREE / "python")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if not any(name.endswith(suffix) for name in wheel.namelist()):
        raise TreeError(f"{wheel.filename}: no extension module for this Python ({suffix}).")


def exported(git: Git = git) -> dict[str, str]:
    """{patch name: text} for the commits on top of the tag `upstream`, in build/tree or a copy."""
    out: dict[str, str] = {}
    for commit in git("rev-list", "--reverse", "upstream..HEAD").split():
        name = re.sub(r"[^a-z0-9]+", "-", git("log", "-1", "--format=%s", commit).lower()).strip(
            "-"
        )
        if f"{name}.patch" in out:
            raise TreeError(f"two commits of build/tree have the subject of {name!r}; reword one.")
        out[f"{name}.patch"] = _export(git, commit)
    return out


def refresh() -> list[str]:
    """Rewrite patches/ from build/tree and return the names that changed."""
    materialise()
    if dirty := git("status", "--porcelain").strip():
        raise TreeError(
            f"build/tree has changes that are not committed:\n{dirty}\n  Commit them first."
        )
    new = exported()
    old = {name: series.read(name).decode() for name in series.names()}
    if list(new) == list(old) and new == old:
        return []
    for name in set(old) - set(new):
        (series.PATCHES / name).unlink()
    for name, text in new.items():
        (series.PATCHES / name).write_text(text)
    (series.PATCHES / "series").write_text("".join(f"{name}\n" for name in new))
    stamp = _read_stamp()
    assert stamp is not None
    head = git("rev-parse", "HEAD").strip()
    _write_stamp(Stamp(pin=stamp.pin, series=series.digest(), head=head, links=stamp.links))
    return sorted(name for name in set(old) | set(new) if old.get(name) != new.get(name)) or [
        "series"
    ]


def _export(git: Git, commit: str) -> str:
    """One commit as text that depends on nothing but its message and its diff."""
    text = git(
        "format-patch", "-1", "-U1", "--stdout", "--keep-subject", "--no-stat", "--no-signature",
        "--zero-commit", "--full-index", "--no-renames", "--diff-algorithm=myers", commit,
    )  # fmt: skip
    head, gap, body = text.partition("\n\n")
    head = re.sub(r"^From: .*(?:\n .*)*$", f"From: {IDENTITY[0]} <{IDENTITY[1]}>", head, flags=re.M)
    head = re.sub(r"^Date: .*\n", "", head, flags=re.M)
    # git repeats an upstream line behind each @@ as a heading: text we need not carry.
    return _HEADING.sub(r"\1", head + gap + body).rstrip("\n") + "\n"


def _unpack(wheel: zipfile.ZipFile) -> None:
    """A new build/tree with one commit, put in place only when it is complete."""
    part = BUILD / "tree.part"
    shutil.rmtree(part, ignore_errors=True)
    wheel.extractall(part / "python", [n for n in wheel.namelist() if ".dist-info/" not in n])
    fresh = Git(folder=part)
    fresh("init", "-q", "-b", "fork")
    (part / ".git/info/exclude").write_text(EXCLUDE)
    fresh("add", "-A")
    fresh("commit", "-q", "-m", f"upstream sglang {load().base}")
    fresh("tag", "upstream")
    shutil.rmtree(TREE, ignore_errors=True)
    part.rename(TREE)


def _replay() -> None:
    before = git("rev-parse", "HEAD").strip()
    git("checkout", "-q", "-f", "-B", "fork", "upstream")
    for name in series.names():
        try:
            git("am", "-q", "--keep-non-patch", str(series.PATCHES / name))
        except TreeError:
            git("am", "--abort")
            git("checkout", "-q", "-f", "-B", "fork", before)
            raise


def _require_no_own_work(stamp: Stamp) -> None:
    if git("rev-parse", "HEAD").strip() == stamp.head and not git("status", "--porcelain").strip():
        return
    raise TreeError(
        "build/tree has work of its own, and patches/ or upstream.txt has changed too.\n"
        "  To keep the tree's work: restore patches/ and upstream.txt with git, then run refresh.\n"
        "  To keep patches/: remove the folder build/tree, then run tree."
    )


def _link_overlay(old: tuple[str, ...]) -> tuple[str, ...]:
    """Link each overlay path at its topmost part that upstream does not have.

    A package that is all ours is one link, so a file added to it is seen at once.
    """
    tracked = git("ls-files", "-z").split("\0")
    folders = {str(parent) for path in tracked for parent in PurePosixPath(path).parents}
    links = set()
    for path in series.overlay():
        whole = PurePosixPath("python", path)
        links.add(str(next(p for p in [*reversed(whole.parents), whole] if str(p) not in folders)))
    for path in set(old) - links:
        (TREE / path).unlink(missing_ok=True)
    for path in links:
        link, target = TREE / path, os.path.relpath(ROOT / path, (TREE / path).parent)
        if not link.is_symlink() or os.readlink(link) != target:
            link.unlink(missing_ok=True)
            link.symlink_to(target)
    exclude = EXCLUDE + "".join(f"/{path}\n" for path in sorted(links))
    (TREE / ".git/info/exclude").write_text(exclude)
    return tuple(sorted(links))


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """One process at a time: an editable install and a check may run together."""
    with (BUILD / "tree.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _stamp_file() -> Path:
    return TREE / ".git" / "sglang-fork.json"


def _read_stamp() -> Stamp | None:
    """None where build/tree was never completed."""
    if not _stamp_file().exists():
        return None
    fields = json.loads(_stamp_file().read_text())
    return Stamp(**{**fields, "links": tuple(fields["links"])})


def _write_stamp(stamp: Stamp) -> None:
    _stamp_file().write_text(json.dumps(asdict(stamp)))
