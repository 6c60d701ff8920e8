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


def try_wheel(wheel: Path) -> int:
    """Rebase onto `wheel` in build/try; print how it went, and return 1 on a conflict."""
    if not wheel.is_file():
        raise TreeError(f"there is no wheel {str(wheel)!r}.")
    tree.materialise()
    shutil.rmtree(TRY, ignore_errors=True)
    tree.git("clone", "-q", "--no-hardlinks", str(tree.TREE), str(TRY))
    git = Git(folder=TRY)
    git("checkout", "-q", "--detach", "upstream")
    git("rm", "-rq", ".")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(
            TRY / "python", [n for n in archive.namelist() if ".dist-info/" not in n]
        )
    (TRY / ".git/info/exclude").write_text("*.so\n/python/sglang/_version.py\n")
    git("add", "-A")
    git("commit", "-q", "--allow-empty", "-m", f"upstream {wheel.name}")
    onto = git("rev-parse", "HEAD").strip()
    try:
        git("rebase", "-q", "--onto", onto, "upstream", "fork")
    except TreeError as conflict:
        print(f"{conflict}\nSolve it in {TRY} (git status says where), then git rebase --continue.")
        return 1
    git("format-patch", "-q", "-U1", "-o", str(BUILD / "try-patches"), onto)
    print(f"The series applies to {wheel.name}. Rebased patches: {BUILD / 'try-patches'}")
    return 0
