"""Make a virtual environment ready for the tests and the demo, doing only what has changed.

Two stamps inside the environment say what it holds: one for the dependencies, one for our own
sources. Unchanged stamps cost no pip call; changed sources reinstall our wheel alone. Every
failure leaves the environment in a state from which the next call goes on.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pip_run import SetupError, pip_install

ROOT = Path(__file__).resolve().parents[1]
NEED_GB = 11
DEPENDENCIES = ("upstream.txt", "constraints.txt", "requirements-dev.txt")
SOURCES = ("pyproject.toml", "upstream.txt", "NOTICE", "patches", "build_backend", "python")

# Run by the environment's own Python: which of these distributions has it, in which version?
_ASK_VERSIONS = """
import importlib.metadata as m, json, sys
found = {}
for name in json.loads(sys.argv[1]):
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A virtual environment and our notes in it."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def notes(self) -> Path:
        """Where stamps, the lock and pip's log lie."""
        return self.folder / ".sglang-rdt"

    def ask(self, code: str, *args: str) -> str:
        done = subprocess.run(
            [str(self.python), "-I", "-c", code, *args], capture_output=True, text=True
        )
        if done.returncode:
            raise SetupError(
                f"the Python of {self.folder} does not start ({done.stderr.strip()[-200:]!r}); "
                "remove that folder or choose another one with VENV=..."
            )
        return done.stdout.strip()

    def stamp(self, name: str) -> str | None:
        file = self.notes / name
        return file.read_text() if file.exists() else None

    def write_stamp(self, name: str, text: str) -> None:
        (self.notes / name).write_text(text)

    def site_packages(self) -> Path:
        return next((self.folder / "lib").glob("python3.*/site-packages"))


def main(venv: str) -> None:
    """Bring the environment at `venv` up to date, telling each phase."""
    env = Environment(folder=Path(venv).absolute())
    is_new = require_usable(env)
    env.notes.mkdir(parents=True, exist_ok=True)
    with locked(env):
        if is_new:
            require_disk(env)
            create(env)
        dependencies = digest(DEPENDENCIES) + env.ask("import sys; print(sys.version.split()[0])")
        sources = digest(SOURCES)
        if env.stamp("dependencies") != dependencies:
            if env.stamp("dependencies") is None and is_satisfied(env):
                say(f"{env.folder} has all dependencies already")
            else:
                install_everything(env)
                env.write_stamp("sources", sources + installed(env))
            env.write_stamp("dependencies", dependencies)
        if is_editable_here(env):
            update_tree()
        elif is_editable(env) or env.stamp("sources") != sources + installed(env):
            install_sources(env)
            env.write_stamp("sources", sources + installed(env))


def require_usable(env: Environment) -> bool:
    """Whether the environment must be made; SetupError if the folder is somebody else's."""
    if env.stamp("making") is not None:
        return True  # an earlier call was stopped in the middle of it
    if env.python.exists():
        wanted = ".".join(map(str, sys.version_info[:2]))
        found = env.ask("import sys; print('%d.%d' % sys.version_info[:2])")
        if found != wanted:
            raise SetupError(
                f"{env.folder} is of Python {found}, PYTHON is {wanted}; "
                "remove that folder or choose another one with VENV=..."
            )
        return False
    if env.folder.exists() and set(env.folder.iterdir()) - {env.notes}:
        raise SetupError(
            f"{env.folder} is no virtual environment; choose another folder with VENV=..."
        )
    return True


def require_disk(env: Environment) -> None:
    """The dependencies must fit, less what is there of them."""
    held = sum(file.lstat().st_size for file in env.folder.rglob("*") if not file.is_dir())
    free = shutil.disk_usage(env.notes).free
    if free + held < NEED_GB * 10**9:
        raise SetupError(
            f"not enough disk: {NEED_GB} GB are needed at {env.folder}, {free / 1e9:.1f} GB are "
            "free; make room or choose another folder with VENV=..."
        )


def create(env: Environment) -> None:
    """Make the environment; running it again over a half-made one completes it."""
    probe = [sys.executable, "-c", "import ensurepip, venv"]
    if subprocess.run(probe, capture_output=True).returncode:
        raise SetupError(
            f"{sys.executable} has no venv module; install it "
            f"(often a package named python3.{sys.version_info.minor}-venv)"
        )
    env.write_stamp("making", "")
    with phase(f"making {env.folder}"):
        command = [sys.executable, "-m", "venv", str(env.folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SetupError(f"{' '.join(command)} failed: {(done.stdout + done.stderr).strip()}")
    env.write_stamp("made", sys.version)
    (env.notes / "making").unlink()


def install_everything(env: Environment) -> None:
    """Dependencies and our wheel in one resolution, as a user would ask for them."""
    require_disk(env)
    drop_half_installed(env)
    with phase("looking for the upstream wheel"):
        fetch_upstream(env)
    if env.stamp("made") is not None:
        with phase("updating pip"):
            pip_install(env.python, "--upgrade", "pip", log=env.notes / "pip.log")
    with phase(f"installing dependencies ({NEED_GB} GB, many minutes the first time)"):
        pip_install(
            env.python, f"{ROOT}[ray]", "-c", str(ROOT / "constraints.txt"),
            "-r", str(ROOT / "requirements-dev.txt"), log=env.notes / "pip.log",
        )  # fmt: skip


def install_sources(env: Environment) -> None:
    """Our wheel alone. Python compiles what it imports, which is less than all of it."""
    with phase("installing this checkout"):
        pip_install(
            env.python, "--no-deps", "--force-reinstall", "--no-compile", str(ROOT),
            log=env.notes / "pip.log",
        )  # fmt: skip


def fetch_upstream(env: Environment) -> None:
    """Have the build backend store its wheel first: small, and with the clearest errors."""
    command = [str(env.python), "-m", "sglang_fork", "fetch"]
    place = {**os.environ, "PYTHONPATH": str(ROOT / "build_backend")}
    done = subprocess.run(command, env=place, capture_output=True, text=True)
    if done.returncode:
        raise SetupError(done.stderr.rpartition("sglang: ")[2].strip())


def update_tree() -> None:
    """An editable install of this checkout is live but for new patches and new files."""
    subprocess.run([str(ROOT / "scripts" / "fork"), "tree"], check=True, stdout=subprocess.DEVNULL)


def drop_half_installed(env: Environment) -> None:
    """pip writes RECORD last: without it a package is half there, and pip would not see that."""
    for info in env.site_packages().glob("*.dist-info"):
        if not (info / "RECORD").exists():
            say(f"removing the half-installed {info.stem}")
            shutil.rmtree(info)


def is_satisfied(env: Environment) -> bool:
    """Whether an environment that was made by hand holds what we would install."""
    pins = dict(re.findall(r"^([\w-]+)==([^\s\\]+)", read(*DEPENDENCIES), re.M))
    others = re.findall(r"^([\w-]+)(?!.*==)", read("requirements-dev.txt"), re.M)
    names = json.dumps([*pins, *others])
    found: dict[str, str] = json.loads(env.ask(_ASK_VERSIONS, names))
    right = all(found.get(name, "").partition("+")[0] == pin for name, pin in pins.items())
    return right and all(name in found for name in others)


def direct_url(env: Environment) -> dict[str, object]:
    """What pip noted about where the installed sglang came from."""
    infos = list(env.site_packages().glob("sglang-*.dist-info/direct_url.json"))
    noted: dict[str, object] = json.loads(infos[0].read_text()) if infos else {}
    return noted


def is_editable(env: Environment) -> bool:
    return '"editable": true' in json.dumps(direct_url(env))


def is_editable_here(env: Environment) -> bool:
    return is_editable(env) and direct_url(env)["url"] == ROOT.as_uri()


def installed(env: Environment) -> str:
    """Changes when somebody installs another sglang into the environment."""
    records = sorted(env.site_packages().glob("sglang-*.dist-info/RECORD"))
    return hashlib.sha256(b"".join(record.read_bytes() for record in records)).hexdigest()


def digest(names: tuple[str, ...]) -> str:
    """One hash over files and folders of the checkout, caches left out."""
    files = [ROOT / name for name in names if (ROOT / name).is_file()]
    files += [file for name in names for file in (ROOT / name).rglob("*") if file.is_file()]
    total = hashlib.sha256()
    for file in sorted(file for file in files if "__pycache__" not in file.parts):
        total.update(f"{file.relative_to(ROOT)}\0".encode())
        total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


def read(*names: str) -> str:
    return "".join((ROOT / name).read_text() for name in names)


@contextlib.contextmanager
def locked(env: Environment) -> Iterator[None]:
    """One at a time: several checkouts may share an environment."""
    with (env.notes / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def phase(what: str) -> Iterator[None]:
    say(f"{what} ...")
    start = time.monotonic()
    yield
    say(f"{what}: done in {time.monotonic() - start:.0f} s")


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except SetupError as error:
        sys.exit(f"setup: error: {error}")
    except KeyboardInterrupt:
        sys.exit("setup: stopped; call again to go on")
