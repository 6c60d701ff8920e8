"""Find the pinned upstream wheel, downloading it with pip when it is not stored yet.

pip is the downloader because it knows the user's mirrors, proxies and certificates and checks
the hashes itself. There is no second choice: a wheel that is not pinned is refused, never
replaced by another one. `build/upstream` is the store; a wheel put there by hand will do.
"""

import hashlib
import platform
import subprocess
import sys
from pathlib import Path

from .errors import ForkError, HashMismatchError, UnavailableError
from .project import BUILD, PIN, pin

STORE = BUILD / "upstream"


def _tag() -> str:
    return f"cp{sys.version_info.major}{sys.version_info.minor}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verified(wheel: Path) -> Path:
    found, wanted = _sha256(wheel), pin()
    if found not in wanted.hashes:
        raise HashMismatchError(
            f"sglang: hash mismatch: {wheel} has sha256 {found!r}, "
            f"which is none of the {len(wanted.hashes)} that {PIN.name} pins "
            f"for sglang {wanted.version}.\n"
            "  The file is damaged or not the released wheel. Delete it and build again."
        )
    return wheel


def stored(*, any_python: bool = False) -> Path | None:
    """The stored wheel for this interpreter (or for any), with its hash checked."""
    pattern = f"sglang-{pin().version}-{'cp3*' if any_python else _tag()}-*{platform.machine()}.whl"
    wheels = sorted(STORE.glob(pattern), key=lambda wheel: (_tag() not in wheel.name, wheel.name))
    return _verified(wheels[0]) if wheels else None


def fetch(*, any_python: bool = False) -> Path:
    """The pinned wheel, downloaded if need be.

    `any_python` takes a wheel for another Python as well: the Python sources are the same in
    all of them, so reading and checking need no particular one.
    """
    if wheel := stored(any_python=any_python):
        return wheel
    STORE.mkdir(parents=True, exist_ok=True)
    code, output = _run_pip(_pip_command())
    if code:
        raise _explain(output)
    if wheel := stored(any_python=any_python):
        return wheel
    raise UnavailableError(
        f"sglang: pip reported success but left no wheel for {_tag()} in {STORE}."
    )


def reachable_pip() -> list[str] | None:
    """The command that starts pip, or None if this interpreter has none.

    pip hides the environment's packages from an isolated build through PYTHONPATH, and itself
    with them. `-I` looks past that, so a build needs no second copy of pip.
    """
    for flags in (["-I"], []):
        probe = [sys.executable, *flags, "-c", "import pip"]
        if subprocess.run(probe, capture_output=True).returncode == 0:
            return [sys.executable, *flags, "-m", "pip"]
    return None


def _pip_command() -> list[str]:
    return [
        *(reachable_pip() or _own_pip()), "download", "--no-deps", "--require-hashes",
        "--only-binary", ":all:", "--disable-pip-version-check", "--no-input",
        "-r", str(PIN), "-d", str(STORE),
    ]  # fmt: skip


def _own_pip() -> list[str]:
    """A pip in build/, for a system Python that ships its pip as a separate package."""
    folder = BUILD / "pip-env"
    made = subprocess.run([sys.executable, "-m", "venv", str(folder)], capture_output=True)
    if made.returncode:
        raise UnavailableError(
            f"sglang: the upstream wheel is not in {STORE}, and {sys.executable} has neither pip "
            "nor venv to get it with.\n  Install one of the two, or put the wheel there by hand."
        )
    return [str(folder / "bin" / "python"), "-m", "pip"]


def _run_pip(command: list[str]) -> tuple[int, str]:
    """Run pip, passing its lines on as they come and keeping them for `_explain`."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    kept = []
    for line in process.stdout:
        sys.stderr.write(line)
        kept.append(line)
    return process.wait(), "".join(kept)


def _explain(output: str) -> ForkError:
    """pip's failure as one of our own, told apart by pip's words."""
    what = f"sglang {pin().version}, pinned in {PIN.name}"
    if "DO NOT MATCH THE HASHES" in output:
        return HashMismatchError(
            f"sglang: hash mismatch: pip was given another wheel for {what}.\n"
            "  A mirror or a find-links folder serves a changed wheel: see 'Expected' and 'Got' "
            "above, and clear it there (or run `pip cache purge`)."
        )
    if "No space left on device" in output:
        return UnavailableError(f"sglang: the disk is full, no room in {STORE} for {what}.")
    if "from versions: none" in output or "Retrying (" in output or "PIP_NO_INDEX" in output:
        return UnavailableError(
            f"sglang: no network: pip reached no package index that has {what}.\n"
            f"  Connect and build again, or put that wheel into {STORE}/,\n"
            "  or set PIP_FIND_LINKS to a folder that has it."
        )
    return UnavailableError(
        f"sglang: pip could not get {what} for Python {platform.python_version()} on "
        f"{platform.system()} {platform.machine()}; its own words are above.\n"
        "  The index may lack this release or a wheel for this platform."
    )
