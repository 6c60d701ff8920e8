"""The command line: fetch, tree, refresh, check, try, release."""

import argparse
import sys
from pathlib import Path

from . import check, project, release, tree, upgrade, upstream
from .errors import ForkError


def main() -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(prog="fork", description="Work on the patches of this fork.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("fetch", help="store the pinned upstream wheel and print its path")
    commands.add_parser("tree", help="make build/tree, or bring it up to date, and print its path")
    commands.add_parser("refresh", help="rewrite patches/ from the commits in build/tree")
    commands.add_parser("check", help="hold patches/ and the overlay against every rule")
    upgrading = commands.add_parser("try", help="dry run: rebase the series onto another wheel")
    upgrading.add_argument(
        "wheel", type=Path, nargs="?", help="left out: export build/try after solving conflicts"
    )
    commands.add_parser("release", help="build twice, compare, and write dist/ with its hashes")
    args = parser.parse_args()
    if args.command == "fetch":
        print(upstream.fetch())
    elif args.command == "tree":
        print(tree.materialise())
    elif args.command == "refresh":
        print("refreshed:", ", ".join(tree.refresh()) or "nothing to do")
    elif args.command == "check":
        return check.run()
    elif args.command == "release":
        for file in release.cut():
            print(file.relative_to(project.ROOT))
        print(f"two builds agree; hashes: dist/{release.SUMS}")
    else:
        return upgrade.try_wheel(args.wheel) if args.wheel else upgrade.export()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ForkError as error:
        sys.exit(str(error))
