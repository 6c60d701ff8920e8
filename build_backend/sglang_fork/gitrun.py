"""Run git in one folder, cut off from the user's and the machine's configuration.

A user's `diff.noprefix` or a hook's GIT_DIR would change what is exported or where it goes.
Identity and dates are fixed, so the same series always gives the same commits.
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .errors import TreeError

IDENTITY = ("sglang-rdt maintainers", "maintainers@example.invalid")
_DATE = "946684800 +0000"
_OPTIONS = (
    "core.autocrlf=false",
    "core.hooksPath=/dev/null",
    "core.attributesFile=/dev/null",
    "core.excludesFile=/dev/null",
    "commit.gpgSign=false",
    "gc.auto=0",
    "advice.detachedHead=false",
)


def environment() -> dict[str, str]:
    """os.environ without any GIT_ variable but ours."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env |= {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1"}
    env |= {"LC_ALL": "C", "TZ": "UTC", "GIT_TERMINAL_PROMPT": "0"}
    for role in ("AUTHOR", "COMMITTER"):
        env[f"GIT_{role}_NAME"], env[f"GIT_{role}_EMAIL"] = IDENTITY
        env[f"GIT_{role}_DATE"] = _DATE
    return env


@dataclass(frozen=True, kw_only=True)
class Git:
    """git in one folder; calling it returns the output, and a failure raises TreeError."""

    folder: Path

    def __call__(self, *args: str) -> str:
        options = [part for option in _OPTIONS for part in ("-c", option)]
        command = ["git", "-C", str(self.folder), *options, *args]
        try:
            done = subprocess.run(command, env=environment(), capture_output=True)
        except FileNotFoundError:
            raise TreeError(
                "git is not installed; build/tree, refresh and check need it."
            ) from None
        if done.returncode:
            said = (done.stdout + done.stderr).decode(errors="replace").strip()
            raise TreeError(f"git {' '.join(args)} failed in {self.folder}:\n{said}")
        return done.stdout.decode(errors="surrogateescape")
