"""When it pays to send only the elements that changed: measures what a delta costs besides the wire, on this machine.

A full sync moves every byte. A delta compares old with new, gathers what changed, moves an index and a value for each
element, and scatters them. Given those costs as shares of one copy, the break-even share of changed elements follows
for any link. Prints a table and, with --json, the numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

SHARES = (0.001, 0.01, 0.02, 0.05, 0.1, 0.3)
LINKS = (0.5, 3.0, 12.0, 44.0, 400.0)
"""GB/s: TCP, cross-memory attach on a small host, 100 Gb/s, 400 Gb/s as reached, NVLink."""
INDEX_BYTES = 4  # within a bucket of less than 2^32 elements


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    call()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def measure(megabytes: int, repeats: int) -> dict[str, object]:
    """Seconds of one copy and, for each share, of compare + gather and of scatter, over bfloat16 elements."""
    torch.set_num_threads(1)
    count = megabytes * 500_000
    old = torch.randn(count).bfloat16()
    target = old.clone()
    copy_s = median_seconds(lambda: target.copy_(old), repeats)
    costs = {}
    for share in SHARES:
        new = old.clone()
        changed = torch.rand(count) < share
        new[changed] += 1
        bits_old, bits_new = old.view(torch.int16), new.view(torch.int16)

        def gather(a: torch.Tensor = bits_old, b: torch.Tensor = bits_new) -> tuple:
            index = torch.nonzero(a != b).view(-1)
            return index, b[index]

        index, values = gather()
        bits = target.copy_(old).view(torch.int16)
        gather_s = median_seconds(gather, repeats)
        scatter_s = median_seconds(
            lambda i=index, v=values, b=bits: b.index_copy_(0, i, v), repeats
        )
        assert torch.equal(bits, bits_new)
        costs[share] = {"gather_s": gather_s, "scatter_s": scatter_s}
    return {"bytes": count * 2, "copy_s": copy_s, "shares": costs}


def delta_seconds(result: dict, share: float, link: float, *, compare_hidden: bool) -> float:
    """Wire of index and value, and scatter; compare and gather too unless they run beside the trainer's step."""
    cost = result["shares"][share]
    changed_bytes = result["bytes"] / 2 * share * (INDEX_BYTES + 2)
    hidden = 0.0 if compare_hidden else cost["gather_s"]
    return changed_bytes / link / 1e9 + cost["scatter_s"] + hidden


def table_of(result: dict) -> Table:
    table = Table(title=f"delta / full, {result['bytes'] / 1e6:.0f} MB of bfloat16")
    table.add_column("link GB/s", justify="right")
    for share in SHARES:
        table.add_column(f"{share:.1%}", justify="right")
    for link in LINKS:
        full = result["bytes"] / link / 1e9
        cells = [
            f"{delta_seconds(result, s, link, compare_hidden=True) / full:.2f} "
            f"({delta_seconds(result, s, link, compare_hidden=False) / full:.2f})"
            for s in SHARES
        ]
        table.add_row(f"{link:g}", *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments.megabytes, arguments.repeats)
    if arguments.json:
        print(json.dumps(result))
        return
    console = Console(width=120)
    console.print(f"one copy: {result['bytes'] / result['copy_s'] / 1e9:.1f} GB/s")
    for share, cost in result["shares"].items():
        copies = [cost[name] / result["copy_s"] for name in ("gather_s", "scatter_s")]
        console.print(
            f"{share:.1%}: compare + gather {copies[0]:.1f} copies, scatter {copies[1]:.2f}"
        )
    console.print(table_of(result))
    console.print("in brackets: with compare and gather in the sync instead of beside the step")


if __name__ == "__main__":
    main()
