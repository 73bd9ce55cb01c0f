"""The kernel's filter of system calls for programs in the sandbox, as bytes for seccomp."""

from __future__ import annotations

import platform
import struct
import sys

# Numbers by machine: ways to new namespaces and mounts, into other processes, and to memory that
# no limit counts. Programs that solve problems need none of them.
CALLS = {
    "x86_64": {
        "arch": 0xC000003E,
        "clone": 56,
        "refused": {
            "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155,
            "chroot": 161, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311,
            "shmget": 29, "msgget": 68, "semget": 64, "add_key": 248, "request_key": 249,
            "keyctl": 250, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
            "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430,
            "fsmount": 432, "mount_setattr": 442, "memfd_create": 319, "vmsplice": 278,
        },
    },
    "aarch64": {
        "arch": 0xC00000B7,
        "clone": 220,
        "refused": {
            "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41,
            "chroot": 51, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271,
            "shmget": 194, "msgget": 186, "semget": 190, "add_key": 217, "request_key": 218,
            "keyctl": 219, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
            "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430,
            "fsmount": 432, "mount_setattr": 442, "memfd_create": 279, "vmsplice": 75,
        },
    },
}  # fmt: skip
CLONE3, NEW_USER = 435, 0x10000000
LOAD, EQUAL, AT_LEAST, BITS, ANSWER = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE, MISSING = 0x7FFF0000, 0x00050000 + 1, 0x00050000 + 38  # EPERM, ENOSYS
OTHER_ABI = 0x40000000  # x32 calls have this bit: other numbers for the same things


def program() -> bytes:
    """The filter of this machine; empty where its numbers are not known here."""
    known = CALLS.get(platform.machine())
    if known is None or sys.byteorder != "little" or sys.maxsize < 2**32:
        return b""
    lines: list[tuple[int, int, int, int]] = [
        (LOAD, 0, 0, 4),
        (EQUAL, 1, 0, known["arch"]),
        (ANSWER, 0, 0, REFUSE),
        (LOAD, 0, 0, 0),
        (AT_LEAST, 0, 1, OTHER_ABI),
        (ANSWER, 0, 0, REFUSE),
        # clone3 keeps its flags in memory, which no filter sees; without it clone is used.
        (EQUAL, 0, 1, CLONE3),
        (ANSWER, 0, 0, MISSING),
    ]
    for number in known["refused"].values():
        lines += [(EQUAL, 0, 1, number), (ANSWER, 0, 0, REFUSE)]
    lines += [
        (EQUAL, 0, 3, known["clone"]),
        (LOAD, 0, 0, 16),
        (BITS, 0, 1, NEW_USER),
        (ANSWER, 0, 0, REFUSE),
        (ANSWER, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
