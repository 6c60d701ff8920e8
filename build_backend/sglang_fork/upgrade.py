"""Dry run of an upgrade: rebase the series onto another upstream wheel.

Old and new upstream are both at hand, so git can merge three ways, which no patch applier can.
It happens in a copy of build/tree; what comes out is a new series to look at and to copy over.
"""

import shutil
import zipfile
from pathlib import Path

from . import tree
from .errors import TreeError
from .gitrun import Git
from .project import BUILD

TRY = BUILD / "try"
SERIES = BUILD / "try-patches"


def try_wheel(wheel: Path) -> int:
    """Rebase onto `wheel` in build/try and export the result; 1 on a conflict."""
    if not wheel.is_file():
        raise TreeError(f"there is no wheel {str(wheel)!r}.")
    tree.materialise()
    shutil.rmtree(TRY, ignore_errors=True)
    tree.git("clone", "-q", "--no-hardlinks", str(tree.TREE), str(TRY))
    git = Git(folder=TRY)
    old = git("rev-parse", "upstream").strip()
    _commit_upstream(git, wheel)
    try:
        git("rebase", "-q", "--onto", "upstream", old, "fork")
    except TreeError as conflict:
        print(
            f"{conflict}\nSolve it in {TRY} as git says, then run: "
            "git rebase --continue, and: scripts/fork try"
        )
        return 1
    return export()


def export() -> int:
    """Write what build/try holds, perhaps after conflicts were solved, as a series."""
    if not TRY.exists():
        raise TreeError("there is no build/try yet: name a wheel.")
    shutil.rmtree(SERIES, ignore_errors=True)
    SERIES.mkdir()
    patches = tree.exported(Git(folder=TRY))
    for name, text in patches.items():
        (SERIES / name).write_text(text)
    (SERIES / "series").write_text("".join(f"{name}\n" for name in patches))
    print(f"The series applies; its {len(patches)} rebased patches are in {SERIES}")
    return 0


def _commit_upstream(git: Git, wheel: Path) -> None:
    git("checkout", "-q", "--detach", "upstream")
    git("rm", "-rq", ".")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        archive.extractall(TRY / "python", names)
    (TRY / ".git/info/exclude").write_text(tree.EXCLUDE)
    git("add", "-A")
    git("commit", "-q", "--allow-empty", "-m", f"upstream {wheel.name}")
    git("tag", "-f", "upstream")
