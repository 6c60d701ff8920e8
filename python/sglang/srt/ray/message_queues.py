"""Shared memory between the ranks of an engine, without a name once everybody has it open.

Upstream broadcasts between ranks of a node through `/dev/shm` files of 25 MB a group, which their creator removes when
it ends; a rank that is killed removes nothing, and Ray ends actors by killing them. A file without a name stays for
those that have it mapped and goes with the last of them, so the names are taken away as soon as all ranks are ready.
"""

from __future__ import annotations

from sglang.srt.distributed import parallel_state


def unlink_message_queues() -> list[str]:
    """Take away the names of what this process created; call it when every rank is ready. Returns the names."""
    unlinked = []
    for find in list(parallel_state._groups.values()):
        group = find()
        queue = None if group is None else group.mq_broadcaster
        buffer = None if queue is None else queue.buffer
        if buffer is None or not buffer.is_creator:
            continue
        buffer.shared_memory.unlink()
        buffer.is_creator = False  # its own end would remove the name a second time
        unlinked.append(buffer.shared_memory.name)
    return unlinked
