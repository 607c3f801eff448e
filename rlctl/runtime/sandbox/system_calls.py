"""Filter of system calls (seccomp): sockets, memory that no limit counts, other processes' state.

It needs no privileges, and holds for all that the process executes.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys

_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # its number, its column below
_OTHER_ABI = 0x40000000  # of x86: numbers from here are another interface

# Numbers on x86-64 and ARM64; None: it does not exist there.
_Number = tuple[int | None, int | None]
_SOCKET = (41, 198)
_SOCKETPAIR = (53, 199)
_CLONE = (56, 220)
_IOCTL = (16, 29)
_PRLIMIT = (302, 261)
_SET_AFFINITY = (203, 122)
_PRCTL = (157, 167)
_ABSENT: list[_Number] = [  # as if the kernel did not have them: programs then do without
    (319, 279),  # memfd_create
    (447, 447),  # memfd_secret
    (29, 194),  # shmget
    (68, 186),  # msgget
    (64, 190),  # semget
    (240, 180),  # mq_open
    (425, 425),  # io_uring_setup
    (435, 435),  # clone3, whose flags a filter cannot read; the C library then calls clone
]
_DENIED: list[_Number] = [
    (101, 117),  # ptrace
    (310, 270),  # process_vm_readv
    (311, 271),  # process_vm_writev
    (438, 438),  # pidfd_getfd
    (272, 97),  # unshare
    (308, 268),  # setns
    (165, 40),  # mount
    (166, 39),  # umount2
    (155, 41),  # pivot_root
    (161, 51),  # chroot
    (428, 428),  # open_tree
    (429, 429),  # move_mount
    (430, 430),  # fsopen
    (432, 432),  # fsmount
    (442, 442),  # mount_setattr
    (304, 265),  # open_by_handle_at
    (248, 217),  # add_key
    (249, 218),  # request_key
    (250, 219),  # keyctl
    (321, 280),  # bpf
    (298, 241),  # perf_event_open
    (323, 282),  # userfaultfd
]
_ATTRIBUTES: list[_Number] = [
    *((90, None), (91, 52), (268, 53), (452, 452)),  # chmod, fchmod, fchmodat, fchmodat2
    *((92, None), (93, 55), (94, None), (260, 54)),  # chown, fchown, lchown, fchownat
    *((132, None), (235, None), (261, None), (280, 88)),  # utime, utimes, futimesat, utimensat
    *((188, 5), (189, 6), (190, 7), (463, 463)),  # setxattr, lsetxattr, fsetxattr, setxattrat
    *((197, 14), (198, 15), (199, 16), (466, 466)),  # removexattr, and its variants
    *((76, 45), (469, 469)),  # truncate, file_setattr
]
_PROCESSES: list[_Number] = [
    *((141, 140), (251, 30)),  # setpriority, ioprio_set
    *((144, 119), (142, 118), (314, 274)),  # sched_setscheduler, sched_setparam, sched_setattr
    *((256, 238), (279, 239)),  # migrate_pages, move_pages
    *((312, 272), (440, 440), (448, 448)),  # kcmp, process_madvise, process_mrelease
]
_SET_DUMPABLE = 4  # prctl: it would hide the memory of a process
_TERMINAL = (0x5412, 0x541C)  # ioctl: TIOCSTI, TIOCLINUX, which type for others
_SET_FLAGS = (0x40086602, 0x401C5820, 0x40087602)  # ioctl: FS_IOC_SETFLAGS, FSSETXATTR, SETVERSION
_NEW_NAMESPACES = 0x7E020000  # all flags of clone for namespaces
_FAMILIES = (2, 10, 16)  # with the network: AF_INET, AF_INET6, and AF_NETLINK for the C library
# Kinds of socket pairs: a pair of datagram sockets could send to other addresses.
_STREAM = 1
_SEQPACKET = 5
_TYPE = 0xF  # mask

# Instructions of BPF.
_LOAD = 0x20
_AND = 0x54
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
# Offsets in struct seccomp_data.
_NUMBER = 0
_MACHINE = 4
_FIRST = 16
_SECOND = 24
# Outcomes of a filter.
_KILL = 0x80000000
_ALLOW = 0x7FFF0000
_ERROR = 0x00050000
_REFUSE = _ERROR + 1  # EPERM
_MISSING = _ERROR + 38  # ENOSYS

_Instruction = tuple[int, int, int, int]  # code, value, instructions to skip if true, if false


class _Filter(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = [("length", ctypes.c_uint16), ("code", ctypes.c_char_p)]


def can_filter() -> bool:
    """Return True if there is a filter for this machine."""
    return sys.platform == "linux" and platform.machine() in _MACHINES


def restrict_calls(*, deny_network: bool, is_isolated: bool) -> bool:
    """Forbid system calls to this process and its children; return True if the kernel does.

    `deny_network` forbids all sockets, otherwise only those of other families than the internet's;
    connected pairs remain. Without `is_isolated`, for systems that do not protect the files and
    processes of others, no file's mode, owner, times or attributes and no other process's limits
    and priorities can be changed.
    """
    if not can_filter():
        return False
    machine, column = _MACHINES[platform.machine()]
    program: list[_Instruction] = [
        (_LOAD, _MACHINE, 0, 0),
        (_EQUAL, machine, 1, 0),
        (_RETURN, _KILL, 0, 0),
        (_LOAD, _NUMBER, 0, 0),
        (_AT_LEAST, _OTHER_ABI, 0, 1),
        (_RETURN, _KILL, 0, 0),
    ]
    denied = _DENIED
    flags = _TERMINAL
    if not is_isolated:
        denied = _DENIED + _ATTRIBUTES + _PROCESSES
        flags = _TERMINAL + _SET_FLAGS
    for numbers, outcome in ((_ABSENT, _MISSING), (denied, _REFUSE)):
        for number in (pair[column] for pair in numbers):
            if number is not None:
                program += [(_EQUAL, number, 0, 1), (_RETURN, outcome, 0, 0)]
    families = () if deny_network else _FAMILIES
    program += _if(_SOCKET[column], [(_LOAD, _FIRST, 0, 0), *_allow(families)])
    kinds = [(_LOAD, _SECOND, 0, 0), (_AND, _TYPE, 0, 0), *_allow((_STREAM, _SEQPACKET))]
    program += _if(_SOCKETPAIR[column], kinds)
    program += _if(
        _CLONE[column],
        [(_LOAD, _FIRST, 0, 0), (_ANY_BIT, _NEW_NAMESPACES, 0, 1), (_RETURN, _REFUSE, 0, 0)],
    )
    hide = [(_LOAD, _FIRST, 0, 0), (_EQUAL, _SET_DUMPABLE, 0, 1), (_RETURN, _REFUSE, 0, 0)]
    program += _if(_PRCTL[column], hide)
    block: list[_Instruction] = [(_LOAD, _SECOND, 0, 0)]
    for request in flags:
        block += [(_EQUAL, request, 0, 1), (_RETURN, _REFUSE, 0, 0)]
    program += _if(_IOCTL[column], block)
    if not is_isolated:
        for pair in (_PRLIMIT, _SET_AFFINITY):
            program += _if(pair[column], [(_LOAD, _FIRST, 0, 0), *_allow((0,))])  # of itself
    program += [(_RETURN, _ALLOW, 0, 0)]
    code = b"".join(struct.pack("HBBI", code, yes, no, k) for code, k, yes, no in program)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(_Filter(len(program), code)), 0, 0) == 0


def _if(number: int, block: list[_Instruction]) -> list[_Instruction]:
    """Return `block` for the system call `number`; it allows what it does not refuse."""
    return [(_EQUAL, number, 0, len(block) + 1), *block, (_RETURN, _ALLOW, 0, 0)]


def _allow(values: tuple[int, ...]) -> list[_Instruction]:
    """Refuse a loaded value that is none of `values`."""
    tests = [(_EQUAL, value, len(values) - at, 0) for at, value in enumerate(values)]
    return [*tests, (_RETURN, _REFUSE, 0, 0)]
