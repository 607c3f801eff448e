"""Programs that try to leave the python tool: their names, their code, what must not happen."""

from __future__ import annotations

from dataclasses import dataclass

# What the programs have: FILE (the user's, of 4 bytes), FOLDER around it, VICTIM (a process of the
# user with SECRET in its environment), PORT (TCP and UDP), PATH and NAME (Unix sockets, NAME is
# abstract), and `call`, which raises the error of a C function.
PRELUDE = """
import array, ctypes, fcntl, mmap, os, platform, resource, signal, socket, struct, threading, time
libc = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
def call(name, *arguments):
    value = getattr(libc, name)(*arguments)
    if value == -1:
        raise OSError(ctypes.get_errno(), name)
    return value
def system_call(x86, arm, *arguments):
    return call("syscall", x86 if X86 else arm, *arguments)
"""

# Each must raise an OSError.
REFUSED = {
    "write a file": "open(FILE, 'w')",
    "write through a link": "os.symlink(FILE, 'link'); open('link', 'a')",
    "write through the root of a process": "open('/proc/self/root' + FILE, 'a')",
    "write through the root of the first process": "open('/proc/1/root' + FILE, 'a')",
    "write through the folder of the parent": "open(f'/proc/{os.getppid()}/root' + FILE, 'a')",
    "a hard link": "os.link(FILE, 'hard')",
    "move a file": "os.rename(FILE, 'moved')",
    "remove a file": "os.unlink(FILE)",
    "make a folder": "os.mkdir(FOLDER + '/new')",
    "make a device": "os.mknod('disk', 0o60600, os.makedev(254, 0)); open('disk')",
    "empty a file": "os.truncate(FILE, 0)",
    "empty a file while opening it": "os.open(FILE, os.O_RDONLY | os.O_TRUNC)",
    "mode": "os.chmod(FILE, 0o777)",
    "mode of a descriptor": "os.fchmod(os.open(FILE, os.O_RDONLY), 0o777)",
    "mode through a link": "os.symlink(FILE, 'mode'); os.chmod('mode', 0o777)",
    "mode by the newest call": "system_call(452, 452, -100, FILE.encode(), 0o777, 0)",
    "owner": "os.chown(FILE, os.getuid(), os.getgid())",
    "times": "os.utime(FILE, (1, 1))",
    "extended attribute": "os.setxattr(FILE, 'user.mine', b'x')",
    "flags": "fcntl.ioctl(os.open(FILE, os.O_RDONLY), 0x40086602, struct.pack('l', 0x40))",
    "TCP": "socket.create_connection(('127.0.0.1', PORT), timeout=20)",
    "TCP over IPv6": "socket.create_connection(('::1', PORT), timeout=20)",
    "UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
    "a Unix socket": "socket.socket(socket.AF_UNIX).connect(PATH)",
    "an abstract socket": "socket.socket(socket.AF_UNIX).connect(NAME)",
    "a pair that sends elsewhere": (
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', NAME + '-packets')"
    ),
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "vsock": "socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)",
    "packets": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "the kernel's cryptography": "socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)",
    "ptrace": "call('ptrace', 16, os.getppid(), 0, 0)",
    "memory of the parent": "open(f'/proc/{os.getppid()}/mem', 'r+b')",
    "read the memory of the parent": "system_call(310, 270, os.getppid(), None, 0, None, 0, 0)",
    "descriptors of the parent": "system_call(438, 438, os.pidfd_open(os.getppid()), 0, 0)",
    "environment of a process": "open(f'/proc/{VICTIM}/environ', 'rb').read()",
    "memory of a process": "open(f'/proc/{VICTIM}/mem', 'rb')",
    "a signal": "os.kill(VICTIM, signal.SIGKILL)",
    "a signal by a descriptor": ("signal.pidfd_send_signal(os.pidfd_open(VICTIM), signal.SIGKILL)"),
    "limits of a process": "resource.prlimit(VICTIM, resource.RLIMIT_CPU, (0, 0))",
    "priority of a process": "os.setpriority(os.PRIO_PROCESS, VICTIM, 19)",
    "cores of a process": "os.sched_setaffinity(VICTIM, {0})",
    "hide from the guard": "call('prctl', 4, 0)",
    "System V memory": "call('shmget', 0, 4096, 0o1600)",
    "System V messages": "call('msgget', 0, 0o1600)",
    "POSIX memory": "open('/dev/shm/rlctl-escape', 'w')",
    "POSIX messages": "system_call(240, 180, b'rlctl-escape', 0o102, 0o600, None)",
    "a file in memory": "os.memfd_create('x')",
    "execute memory": (
        "file = os.memfd_create('x'); os.write(file, open('/bin/true', 'rb').read()); "
        "os.execve(file, ['true'], {})"
    ),
    "secret memory": "system_call(447, 447, 0)",
    "io_uring": "system_call(425, 425, 1, bytes(120))",
    "page faults": "system_call(323, 282, 1)",
    "BPF": "system_call(321, 280, 0, bytes(120), 120)",
    "performance counters": "system_call(298, 241, bytes(120), 0, -1, -1, 0)",
    "keys": "system_call(250, 219, 0, -3, 0)",
    "a user namespace": "call('unshare', 0x10000000)",
    "a user namespace by clone": "system_call(56, 220, 0x10000000 | 17, 0, 0, 0, 0)",
    "a user namespace by clone3": (
        "system_call(435, 435, struct.pack('11Q', 0x10000000, *[0] * 3, 17, *[0] * 6), 88)"
    ),
    "another network namespace": "call('setns', os.open(f'/proc/{VICTIM}/ns/net', 0), 0)",
    "a mount": "call('mount', b'tmpfs', b'.', b'tmpfs', 0, None)",
    "a writable mount": "call('mount', None, b'/', None, 32 | 4096, None)",
    "another root": "os.chroot('.')",
    "a terminal's input": "fcntl.ioctl(0, 0x5412, b'x')",
}


@dataclass(frozen=True)
class Escape:
    """Program, and what its result must contain. It marks its processes with NAME as their name."""

    code: str
    result: str
    files: bool = False  # only where a program has a file system of its own


_MARK = "call('prctl', 15, MARK.encode()); "
_DAEMON = f"""
def daemon(work):
    if os.fork() == 0:
        {_MARK}call('prctl', 1, 0); call('prctl', 36, 1)
        os.setsid()
        if os.fork() == 0:
            os.setsid() if os.getpid() != os.getsid(0) else None
            for number in set(signal.Signals) - {{signal.SIGKILL, signal.SIGSTOP}}:
                signal.signal(number, signal.SIG_IGN)
            work()
        time.sleep(600)
"""

LIMITED = {
    "a daemon that keeps the output": Escape(
        f"{_DAEMON}\ndaemon(lambda: time.sleep(600))\nprint('left')", "left"
    ),
    "a daemon that closes the output": Escape(
        f"{_DAEMON}\ndaemon(lambda: (os.closerange(0, 64), time.sleep(600)))\nprint('left')", "left"
    ),
    "a process that survives its parent": Escape(
        f"{_MARK}call('prctl', 1, 0)\nif os.fork(): os._exit(0)\ntime.sleep(600)", ""
    ),
    "a program that ignores signals for ever": Escape(
        f"{_DAEMON}\n{_MARK}daemon(lambda: time.sleep(600))\ntime.sleep(600)", "timed out"
    ),
    "a chain of processes": Escape(
        f"{_MARK}\nwhile True:\n    call('prctl', 1, 0)\n    if os.fork(): os._exit(0)\n"
        "    os.setsid()",
        "",
    ),
    "stop the guard": Escape(
        f"{_MARK}\ntry: os.kill(os.getppid(), signal.SIGSTOP)\nexcept OSError: pass\n"
        "time.sleep(600)",
        "timed out",
    ),
    "end the guard": Escape(
        f"{_MARK}\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "try: os.kill(os.getppid(), signal.SIGTERM)\nexcept OSError: time.sleep(600)\n"
        "time.sleep(600)",
        "",  # it may: the guard then ends the program
    ),
    "kill the guard": Escape(
        f"{_MARK}call('prctl', 1, 0)\ntry: os.kill(os.getppid(), signal.SIGKILL)\n"
        "except OSError: pass\ntime.sleep(600)",
        "timed out",
    ),
    "memory of processes that left": Escape(
        f"{_DAEMON}\ndef hold():\n    keep = bytearray(100 * 2**20); time.sleep(600)\n"
        "for _ in range(6): daemon(hold)\ntime.sleep(600)",
        "more than 128 MiB of memory",
    ),
    "memory of a process that hides": Escape(
        f"{_MARK}libc.prctl(4, 0, 0, 0, 0)\n"
        "shared = mmap.mmap(-1, 400 * 2**20)\n"
        "for _ in range(300): shared.write(bytes(2**20))\ntime.sleep(600)",
        "more than 128 MiB of memory",
    ),
    "memory at once": Escape("bytearray(2**31)", "MemoryError"),
    "processes that left": Escape(
        f"{_DAEMON}\nfor _ in range(200): daemon(lambda: time.sleep(600))\ntime.sleep(600)",
        "more than 64 processes",
    ),
    "a large file": Escape(
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "open('large', 'wb').write(bytes(3 * 2**20))",
        "OSError",
    ),
    "many files": Escape(
        "for i in range(3): open(str(i), 'wb').write(bytes(2**20))",
        "No space left on device",
        files=True,
    ),
    "output without end": Escape("while True: print('x' * 100_000)", "timed out"),
    "a text that is no Unicode": Escape("'\ud800'", "UnicodeEncodeError"),
    "a race of links": Escape(
        "open('own', 'w').close()\n"
        "def swap():\n    for i in range(3000):\n"
        "        os.symlink((FILE, 'own')[i % 2], 'new'); os.replace('new', 'racing')\n"
        "swapping = threading.Thread(target=swap); swapping.start()\n"
        "while swapping.is_alive():\n"
        "    try: open('racing', 'w').write('raced')\n"
        "    except OSError: pass\n"
        "    try: os.chmod('racing', 0o777)\n"
        "    except OSError: pass\n"
        "print('ended')",
        "ended",
    ),
}
