"""A filter of system calls for programs in the jail: those that use memory outside of their limits, or reach the host.

Memory without a process (memfd, System V) escapes every limit. New user namespaces, io_uring and bpf give rights in the
kernel. Sockets other than local ones and IP may leave the jail's network namespace: AF_VSOCK reaches a VM's host.

    make_filter("x86_64")  # bytes for bwrap's --seccomp: a classic BPF program
"""

import struct

_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
_CLONE_NEWUSER = 0x10000000
_X32 = 0x40000000  # the first number of another table of system calls, which x86_64 kernels also accept
# Fields of struct seccomp_data.
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16
_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _NO_SUCH_CALL = 0x7FFF0000, 0x00050000 | 38  # ENOSYS: the C library then uses clone instead of clone3
# Each machine has its number in the kernel, and its numbers of clone, of socket, and of the calls to reject.
_MACHINES = {
    "x86_64": (0xC000003E, 56, 41, {
        "memfd_create": 319, "memfd_secret": 447, "shmget": 29, "unshare": 272, "setns": 308, "clone3": 435,
        "io_uring_setup": 425, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "add_key": 248, "keyctl": 250,
    }),
    "aarch64": (0xC00000B7, 220, 198, {
        "memfd_create": 279, "memfd_secret": 447, "shmget": 194, "unshare": 97, "setns": 268, "clone3": 435,
        "io_uring_setup": 425, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "add_key": 217, "keyctl": 219,
    }),
}  # fmt: skip


def make_filter(machine: str) -> bytes:
    """Return the filter for ``machine``, a value of ``platform.machine()``. Raise ValueError if it has no table."""
    if machine not in _MACHINES:
        raise ValueError(f"no list of system calls for {machine}, only for {' and '.join(_MACHINES)}")
    number, clone, socket, calls = _MACHINES[machine]
    reject, allow = _pack(_RETURN, _NO_SUCH_CALL), _pack(_RETURN, _ALLOW)
    is_family = b"".join(_pack(_EQUAL, family, 0, 1) + allow for family in _FAMILIES)
    return b"".join(
        [
            _pack(_LOAD, _MACHINE), _pack(_EQUAL, number, 1, 0), reject, _pack(_LOAD, _NUMBER),
            _pack(_AT_LEAST, _X32, 0, 1), reject, *(_pack(_EQUAL, call, 0, 1) + reject for call in calls.values()),
            _pack(_EQUAL, clone, 0, 4), _pack(_LOAD, _FIRST_ARGUMENT), _pack(_HAS_BITS, _CLONE_NEWUSER, 0, 1), reject,
            allow, _pack(_EQUAL, socket, 1, 0), allow, _pack(_LOAD, _FIRST_ARGUMENT), is_family, reject,
        ]
    )  # fmt: skip


def _pack(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return an instruction; a jump skips ``if_true`` or ``if_false`` instructions."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
