"""Starts one program shut off from the machine; run as a script with the number of a descriptor.

The launcher makes the namespaces, its child is the first process (init) in them and mounts a root
of just what Python needs, and that one's child drops every right and becomes the program. When
init ends the kernel kills whatever is left, so nothing outlives the launcher. It imports little,
because it starts once for each program. Messages on the status descriptor: `s` the program starts,
`e` and a text: it could not, `d` and three numbers: how it ended, its seconds of CPU, its peak KiB.
"""

import _signal as signal  # the module of that name adds 12 ms of enumerations
import marshal
import os
import resource
import sys
import time

LINUX = sys.platform == "linux"
NEW_USER, NEW_PID, NEW_NET = 0x10000000, 0x20000000, 0x40000000
NEW_MOUNT, NEW_IPC, NEW_UTS = 0x00020000, 0x08000000, 0x04000000
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC, REMOUNT = 1, 2, 4, 8, 32
BIND, RECURSIVE, PRIVATE, DETACH = 4096, 16384, 1 << 18, 2
STACK = 32 * 2**20
DEVICES = ("null", "zero", "full", "random", "urandom")
if LINUX:
    import ctypes

    LIBC = ctypes.CDLL(None, use_errno=True)


def call(name, *arguments):
    """A function of the C library; raises OSError where it answers -1."""
    if getattr(LIBC, name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def control(option, value=0, *rest):
    """One prctl, with arguments as wide as the kernel reads them."""
    call("prctl", option, *(ctypes.c_ulong(one) for one in (value, *rest, *[0] * (3 - len(rest)))))


def mount(source, target, kind, flags, options=None):
    def encoded(text):
        return None if text is None else os.fsencode(text)

    call(
        "mount",
        encoded(source),
        encoded(target),
        encoded(kind),
        ctypes.c_ulong(flags),
        encoded(options),
    )


def show(source, target):
    """The source, and all that is mounted below it, at the target: read-only."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))
    mount(source, target, None, BIND | RECURSIVE)
    # mount_setattr: the only call that reaches the mounts below as well.
    set_bits = (ctypes.c_uint64 * 4)(READ_ONLY | NO_SUID | NO_DEVICES, 0, 0, 0)
    number, here, below = 442, -100, 0x8000
    call("syscall", number, here, os.fsencode(target), below, set_bits, ctypes.c_size_t(32))


def make_root(job):
    """A new root out of read-only parts of the old one, with a small writable /tmp."""
    mount(None, "/", None, RECURSIVE | PRIVATE)
    root = job["mount_point"]
    mount("tmpfs", root, "tmpfs", NO_SUID | NO_DEVICES, "size=16m,mode=755")
    for path in job["shown"]:
        if os.path.islink(path) and path.count("/") == 1:  # /lib -> usr/lib
            os.symlink(os.readlink(path), root + path)
        else:
            show(path, root + path)
    for name in ("proc", "dev", "dev/shm", "tmp"):
        os.mkdir(f"{root}/{name}")
    mount("proc", f"{root}/proc", "proc", NO_SUID | NO_DEVICES | NO_EXEC, "hidepid=2")
    for name in DEVICES:
        os.close(os.open(f"{root}/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o444))
        mount(f"/dev/{name}", f"{root}/dev/{name}", None, BIND)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{root}/dev/{name}")
    os.symlink("/proc/self/fd", f"{root}/dev/fd")
    size = f"size={job['file_kb']}k,nr_inodes=1024,mode=1777"
    mount("tmpfs", f"{root}/tmp", "tmpfs", NO_SUID | NO_DEVICES, size)
    mount(f"{root}/tmp", f"{root}/dev/shm", None, BIND)
    write_files(job, f"{root}/code")
    os.chdir(root)
    call("pivot_root", b".", b".")
    call("umount2", b".", DETACH)
    mount(None, "/", None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES)
    os.chdir("/tmp")
    call("sethostname", b"sandbox", 7)


def write_files(job, folder):
    os.mkdir(folder, 0o755)
    for name, content in job["files"].items():
        with open(f"{folder}/{name}", "wb") as file:
            file.write(content)


def bound(kind, value):
    """A limit that can only be lowered from here; where the system has none, it stays off."""
    try:
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    except (OSError, ValueError):
        pass


def drop_rights(job):
    """Limits, then another user without capabilities, who can get no new ones."""
    bound(resource.RLIMIT_AS, job["memory_mb"] * 2**20)
    bound(resource.RLIMIT_CPU, job["cpu_s"])
    bound(resource.RLIMIT_FSIZE, job["file_kb"] * 1024)
    bound(resource.RLIMIT_CORE, 0)
    bound(resource.RLIMIT_NOFILE, 64)
    bound(resource.RLIMIT_STACK, STACK)
    if job["count_processes"]:
        # In a namespace of users the launcher and init are counted with it.
        bound(resource.RLIMIT_NPROC, job["processes"] + (0 if job["uid"] else 2))
    if not LINUX:
        return
    try:
        control(
            28, 3
        )  # PR_SET_SECUREBITS: a user 0 without capabilities gets none by a new program
        for capability in range(64):
            control(24, capability)  # PR_CAPBSET_DROP
    except OSError:
        pass  # past the last one, or not allowed: then there are none to drop
    if job["uid"]:
        os.setgroups([])
        os.setresgid(job["uid"], job["uid"], job["uid"])
        os.setresuid(job["uid"], job["uid"], job["uid"])
    control(38, 1)  # PR_SET_NO_NEW_PRIVS
    if job["filter"]:
        program = (ctypes.c_uint8 * len(job["filter"])).from_buffer_copy(job["filter"])
        # struct sock_fprog: the number of instructions, and where they are
        pointer = ctypes.addressof(program)
        words = (ctypes.c_size_t * 2)(len(job["filter"]) // 8, pointer)
        control(22, 2, ctypes.addressof(words))  # PR_SET_SECCOMP, a filter


def become_program(job, folder, work):
    """Replaces this process by the program; what goes wrong before is told on the status."""
    try:
        os.setsid()  # a signal to its group reaches nothing but itself
        os.chdir(work)
        os.umask(0o022)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        drop_rights(job)
        env = {name: value.replace("{work}", work) for name, value in job["env"].items()}
        argv = [part.replace("{code}", folder) for part in job["argv"]]
        os.write(job["status"], b"s\n")
        os.execve(argv[0], argv, env)
    except BaseException as error:
        os.write(job["status"], f"e{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(127)


def report(job, status, usage):
    cpu = usage.ru_utime + usage.ru_stime
    os.write(job["status"], f"d{status} {cpu:.3f} {usage.ru_maxrss}\n".encode())


def be_init(job, alive):
    """The first process in the namespaces: it mounts, starts the program and waits for its end."""
    try:
        control(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not even a killed launcher leaves one
        os.set_blocking(alive, False)
        try:
            os.read(alive, 1)
            os._exit(1)  # the launcher was gone before the call above
        except BlockingIOError:
            pass
        control(4, 0)  # PR_SET_DUMPABLE: its descriptors are nobody's to open
        make_root(job)
        program = os.fork()
        if not program:
            become_program(job, "/code", "/tmp")
        for number in range(3):  # the ends of the pipes are the program's alone
            os.close(number)
        while True:
            ended, status, usage = os.wait4(-1, 0)
            if ended == program:
                report(job, status, usage)
                break
    except BaseException as error:
        os.write(job["status"], f"e{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(0)


def in_namespaces(job):
    user, group = os.getuid(), os.getgid()
    flags = NEW_MOUNT | NEW_PID | NEW_NET | NEW_IPC | NEW_UTS
    call("unshare", flags | (0 if job["uid"] else NEW_USER))
    if not job["uid"]:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"1000 {user} 1"),
            ("gid_map", f"1000 {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        control(1, signal.SIGKILL)  # new rights take the first one away
    waiting = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, waiting)
    alive, held = os.pipe()
    first = os.fork()
    if not first:
        os.close(held)
        be_init(job, alive)
    for number in range(3):
        os.close(number)
    if signal.sigwait(waiting) == signal.SIGTERM:
        os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)  # returns when every process of the namespace is gone


def descendants():
    """The processes below this one: process -> its number of threads."""
    if not LINUX:
        return {}
    parents, threads = {}, {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields[0] != b"Z":
                parents[int(name)], threads[int(name)] = int(fields[1]), int(fields[17])
    found, before = {os.getpid()}, 0
    while len(found) > before:
        before = len(found)
        found |= {one for one, parent in parents.items() if parent in found}
    return {one: threads[one] for one in found - {os.getpid()}}


def remove(folder):
    for place, folders, files in os.walk(folder, topdown=False):
        for name in files + folders:
            path = os.path.join(place, name)
            try:
                os.rmdir(path) if name in folders and not os.path.islink(path) else os.unlink(path)
            except OSError:
                pass
    os.rmdir(folder)


def end_all(program):
    """Kills the program's group and all below this process, until none is left."""
    try:
        os.killpg(program, signal.SIGKILL)
    except OSError:
        pass
    while True:
        for one in descendants():
            try:
                os.kill(one, signal.SIGKILL)
            except OSError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def with_limits_only(job):
    """No namespaces: limits, an own session, and a sweep of all that the program started."""
    stopped = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    if LINUX:
        control(36, 1)  # PR_SET_CHILD_SUBREAPER: what loses its parent becomes ours
        control(1, signal.SIGTERM)
    folder = job["folder"]
    os.mkdir(folder, 0o755)
    try:
        write_files(job, f"{folder}/code")
        os.mkdir(f"{folder}/work")
        if job["uid"]:
            os.chown(f"{folder}/work", job["uid"], job["uid"])
        program = os.fork()
        if not program:
            become_program(job, f"{folder}/code", f"{folder}/work")
        for number in range(3):
            os.close(number)
        status = usage = None
        for turn in range(10**9):
            ended, status, usage = os.wait4(program, os.WNOHANG)
            if ended or stopped or os.getppid() != job["parent"]:
                break
            if turn % 8 == 7 and sum(descendants().values()) > job["processes"]:
                os.write(job["status"], b"p\n")
                break
            time.sleep(0.005)
        end_all(program)
        if ended:
            report(job, status, usage)
    finally:
        remove(folder)


def main():
    descriptor = int(sys.argv[1])
    with os.fdopen(descriptor, "rb") as file:
        job = marshal.load(file)
    os.set_inheritable(job["status"], False)
    os.umask(0o022)
    if LINUX:
        control(1, signal.SIGKILL)
        if os.getppid() != job["parent"]:
            return
        try:
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")  # the first to go where the machine itself is out of memory
        except OSError:
            pass
    try:
        in_namespaces(job) if job["namespaces"] else with_limits_only(job)
    except BaseException as error:
        os.write(job["status"], f"e{type(error).__name__}: {error}\n".encode())


if __name__ == "__main__":
    main()
