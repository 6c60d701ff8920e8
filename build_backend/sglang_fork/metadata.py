"""The dist-info texts: upstream's METADATA with a few exact lines changed, and the licence list.

Upstream's METADATA is never parsed and written again, because its License field is hundreds of
folded lines. Each edit names one whole line that must occur exactly once, so an upstream
release that words it differently stops the build.
"""

from . import series
from .errors import ProjectError
from .project import ROOT, Project

NOTICE = "NOTICE"
MODIFIED = "MODIFIED-FILES"


def metadata(upstream: bytes, project: Project) -> bytes:
    """Upstream's METADATA for our version, with the edits of pyproject.toml."""
    edits = {
        f"Version: {project.base}": (f"Version: {project.version}",),
        "License-File: LICENSE": tuple(
            f"License-File: {name}" for name in ("LICENSE", NOTICE, MODIFIED)
        ),
    }
    return replace_lines(upstream, {**edits, **project.metadata_edits})


def replace_lines(text: bytes, edits: dict[str, tuple[str, ...]]) -> bytes:
    """Replace whole header lines; each must be there exactly once."""
    head, gap, body = text.partition(b"\n\n")
    lines = head.decode().split("\n")
    for old, new in edits.items():
        if (count := lines.count(old)) != 1:
            raise ProjectError(
                f"METADATA: upstream has the line {old!r} {count} times, expected once.\n"
                "  Bring [tool.sglang-fork.metadata] in pyproject.toml up to this upstream."
            )
        at = lines.index(old)
        lines[at : at + 1] = new
    return "\n".join(lines).encode() + gap + body


def licences(project: Project) -> dict[str, bytes]:
    """{name in dist-info/licenses: text} of what we add beside upstream's own licence.

    Section 4 of the Apache License asks that changed files be marked as changed.
    """
    rows = [
        f"{path.removeprefix('python/')}  (patches/{name})" for path, name in series.edits().items()
    ]
    rows.append("sglang/_version.py  (written anew by the build)")
    head = (
        f"sglang {project.version} is built from sglang {project.base}.\n"
        "These upstream files were changed; each patch says why:\n\n"
    )
    listing = head + "".join(f"  {row}\n" for row in sorted(rows))
    return {NOTICE: (ROOT / NOTICE).read_bytes(), MODIFIED: listing.encode()}
