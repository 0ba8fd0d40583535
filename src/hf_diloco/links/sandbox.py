"""What a gateway or courier may still do once it is linked, should a peer take it over: next to nothing.

The RPC codec is ours (``wire``), but torch's C++ runs ATen operators for whoever reaches it, and parses what it is
sent. So the kernel refuses what neither process needs any more: to open, make or rename files, to run programs, to
fork, to signal others, and (gateways) to make connections. Refused calls fail with EPERM, nobody is killed.

Two seccomp filters, since the RPC agent needs more while it starts: :func:`before_agent`, then :func:`lock`.
Linux on x86_64 and aarch64. Whether it works here is tried out in a throw-away process (``agent.self_test``); where it
does not, links work without, and the log says so.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import socket
import struct
from collections.abc import Callable

from hf_diloco.errors import UnsupportedError


class NoSandboxError(UnsupportedError):
    """There are no seccomp filters here, or they do not hold; the message says why."""


DATA_BYTES = 1 << 30  # private memory that a peer's bytes may take: calls of 40 MiB as JSON, pieces under way

# Numbers of system calls: on x86_64, on aarch64 (None: it has no such call).
_IO_URING = {"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427)}
_CONNECTING = {"socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201)}
_FORBIDDEN: dict[str, tuple[int, int | None]] = {
    # files
    "open": (2, None), "openat": (257, 56), "openat2": (437, 437), "creat": (85, None), "truncate": (76, 45),
    "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "mknod": (133, None), "mknodat": (259, 33),
    "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "inotify_init1": (294, 26), "fanotify_init": (300, 262),
    # programs and other processes
    "execve": (59, 221), "execveat": (322, 281), "fork": (57, None), "vfork": (58, None),
    "kill": (62, 129), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    # memory that others see, by name
    "shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    # the system
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "mount_setattr": (442, 442), "setns": (308, 268),
    "unshare": (272, 97), "bpf": (321, 280), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "sethostname": (170, 161), "setrlimit": (160, 164), "prctl": (157, 167), "personality": (135, 92),
    "seccomp": (317, 277),
}  # fmt: skip
_CLONE, _CLONE3, _TGKILL, _PRLIMIT, _SECCOMP = (56, 220), (435, 435), (234, 131), (302, 261), (317, 277)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH_*

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF
_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
_X32 = 0x40000000  # numbers from here on are those of x86_64's other ABI
_CLONE_THREAD = 0x10000
_PR_SET_NO_NEW_PRIVS, _SET_MODE_FILTER, _ALL_THREADS = 38, 1, 1


def before_agent() -> None:
    """First stage. libuv would keep an io_uring of its own, which the second stage must not leave open.

    Raises:
        NoSandboxError: there is no seccomp here.
    """
    _install(_program([*_IO_URING.values()], _ENOSYS, []))


def lock(*, may_connect: bool) -> None:
    """Second stage, for all threads of this process and for ever: everything it needs is imported, open and started.

    Raises:
        NoSandboxError: there is no seccomp here.
    """
    column = _machine()[0]
    forbidden = [*_FORBIDDEN.values(), *({} if may_connect else _CONNECTING).values()]
    special = [
        # glibc falls back to clone, whose flags can be looked at
        [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ENOSYS)],
        _only_if(_CLONE[column], [(_LOAD, 0, 0, _argument(0)), (_ANY_BIT, 1, 0, _CLONE_THREAD)]),
        # abort() signals itself
        _only_if(_TGKILL[column], [(_LOAD, 0, 0, _argument(0)), (_EQUAL, 1, 0, os.getpid())]),
        # limits may be read: the address of new ones is zero
        _only_if(
            _PRLIMIT[column],
            [(_LOAD, 0, 0, _argument(2)), (_EQUAL, 0, 2, 0), (_LOAD, 0, 0, _argument(2) + 4), (_EQUAL, 1, 0, 0)],
        ),
    ]
    _install(_program(forbidden, _EPERM, special))


def limit_memory() -> None:
    """Bound the private memory of this process to what it has and DATA_BYTES: an announced length of 10 GB ends it."""
    with open("/proc/self/status", encoding="ascii") as file:
        used = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + DATA_BYTES, used + DATA_BYTES))


def check_locked(*, may_connect: bool) -> None:
    """Try what is forbidden. In a throw-away process that is locked.

    Raises:
        NoSandboxError: something was possible.
    """
    attempts: dict[str, Callable[[], object]] = {
        "opening a file": lambda: os.open("/dev/null", os.O_RDONLY),
        "running a program": lambda: os.execv("/nonexistent/program", ["program"]),
        "forking": lambda: os.fork() or os._exit(0),
        "signalling": lambda: os.kill(os.getppid(), 0),
        "removing a file": lambda: os.unlink("/nonexistent/file"),
    }
    if not may_connect:
        attempts["making a socket"] = socket.socket
    for what, attempt in attempts.items():
        try:
            attempt()
        except PermissionError:
            continue
        except OSError as error:
            raise NoSandboxError(f"{what} was not forbidden ({error.strerror})") from error
        raise NoSandboxError(f"{what} was not forbidden")


# ----------------------------------------------------------------------------------------------------------------- BPF

_Instruction = tuple[int, int, int, int]  # operation, instructions to skip if true, if false, operand


def _machine() -> tuple[int, int]:
    try:
        return _MACHINES[platform.machine()]
    except KeyError:
        raise NoSandboxError(f"no list of system calls for processors of type {platform.machine()}") from None


def _argument(index: int) -> int:
    """Where the low half of a system call's argument is (little-endian)."""
    return 16 + 8 * index


def _only_if(number: int, test: list[_Instruction]) -> list[_Instruction]:
    """This call is refused unless ``test`` ends with skipping one instruction."""
    body = [*test, (_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(body), number), *body]


def _program(
    forbidden: list[tuple[int, int | None]] | list[tuple[int, int]], refusal: int, special: list[list[_Instruction]]
) -> list[_Instruction]:
    column, architecture = _machine()
    program = [
        (_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0), (_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _EPERM),
    ]  # fmt: skip
    for instructions in special:
        program += instructions
    for numbers in forbidden:
        number = numbers[column]
        if number is not None:
            program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, refusal)]
    return [*program, (_RETURN, 0, 0, _ALLOW)]


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _install(program: list[_Instruction]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *instruction) for instruction in program))
    described = _FilterProgram(len(program), ctypes.cast(code, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    column = _machine()[0]
    no_more = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    arguments = [ctypes.c_long(value) for value in (_SECCOMP[column], _SET_MODE_FILTER, _ALL_THREADS)]
    if no_more or libc.syscall(*arguments, ctypes.byref(described)):
        raise NoSandboxError(f"this kernel or container has no seccomp filters ({os.strerror(ctypes.get_errno())})")
