"""Run `pip install` so that a person sees progress and a failure has one clear line.

On a terminal pip shows its own bars. Elsewhere it is quiet, and a line now and then says what
it is doing. pip's log is kept and, on failure, searched for the few causes that a person can
put right.
"""

import re
import subprocess
import sys
import threading
from pathlib import Path

HEARTBEAT_SECONDS = 30.0

_CAUSES = (
    ("No space left on device|Errno 28", "the disk is full; make room and call again"),
    (
        "(?i)hash mismatch|DO NOT MATCH THE HASHES",
        "hash mismatch: a downloaded file is not the pinned one; see the log, clear that file",
    ),
    (
        r"from versions: none|Retrying \(Retry|name resolution|Network is unreachable"
        "|Connection refused|ReadTimeoutError|no network",
        "no network: pip reached no package index that has it; connect and call again",
    ),
)


class SetupError(Exception):
    """A reason to stop that fits in one line and says what to do."""


def pip_install(python: Path, *args: str, log: Path) -> None:
    """Run `pip install ARGS` with `python`, or raise SetupError with the cause."""
    log.unlink(missing_ok=True)
    command = [
        str(python), "-m", "pip", "--log", str(log), "--disable-pip-version-check", "--no-input",
        "install",
    ]  # fmt: skip
    if sys.stdout.isatty():
        code = subprocess.run([*command, *args], stdin=subprocess.DEVNULL).returncode
    else:
        code = _quietly([*command, "-q", "--progress-bar", "off", *args], log)
    if code:
        raise SetupError(f"{cause(log.read_text(errors='replace'))} (log: {log})")


def cause(log: str) -> str:
    """The reason for a failure in one line, from pip's log."""
    for pattern, text in _CAUSES:
        if re.search(pattern, log):
            return text
    errors = re.findall(r"(?:ERROR|error): (.*)", log)
    return f"pip failed: {errors[-1] if errors else 'it gave no reason'}"


def _quietly(command: list[str], log: Path) -> int:
    done = threading.Event()
    thread = threading.Thread(target=_heartbeat, args=(log, done), daemon=True)
    thread.start()
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL).returncode
    finally:
        done.set()
        thread.join()


def _heartbeat(log: Path, done: threading.Event) -> None:
    seconds = 0.0
    while not done.wait(HEARTBEAT_SECONDS):
        seconds += HEARTBEAT_SECONDS
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        doing = [line for line in lines if re.search("Collecting|Downloading|Installing", line)]
        last = doing[-1].partition(" ")[2].strip()[:100] if doing else "waiting for pip"
        print(f"setup:   {seconds:.0f} s: {last}", flush=True)
