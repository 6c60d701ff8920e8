"""The command line of the doctor: lines as they are found, or one JSON object.

Ends with 0 when nothing failed (warnings included) and with 1 when something did. It starts no engine and no Ray, and
changes nothing on the machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import sys
from collections.abc import Sequence

from sglang.srt.ray.doctor import CHECKS
from sglang.srt.ray.doctor.findings import Place, examined, worst


def main(arguments: Sequence[str] | None = None) -> int:
    """Go through `CHECKS`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang.srt.ray.doctor",
        description="Check that this machine is fit for engines and weight syncs.",
        epilog="The exit status is 1 when something failed, else 0. Run it where the engine runs, as its user and with "
        "its environment.",
    )
    parser.add_argument(
        "--address",
        help="of the Ray cluster (its GCS, HOST:PORT); a running one is found by itself",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    options = parser.parse_args(arguments)
    findings = []
    for finding in examined(CHECKS, Place(environment=os.environ, address=options.address)):
        findings.append(finding)
        if not options.json:
            print(finding.line, flush=True)
    status = worst(findings)
    if options.json:
        told = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"host": socket.gethostname(), "status": status, "findings": told}))
    return 1 if status == "fail" else 0


if __name__ == "__main__":
    sys.exit(main())
