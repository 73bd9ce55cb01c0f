"""The sandbox's limits and walls, probed by programs that do no harm where one does not hold."""

import concurrent.futures
import glob
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest

from xrpo_jax.verify import code_filter, code_root, sandbox
from xrpo_jax.verify.sandbox import Limits, Program

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the sandbox needs processes of Unix")
shut = pytest.mark.skipif(
    sandbox.available() != "namespaces", reason="this machine grants no namespaces"
)


def run(code, *, given=b"", mode=None, **limits):
    program = Program(
        files={"main.py": textwrap.dedent(code).encode()}, stdin=sandbox.readable(given)
    )
    return sandbox.run([program], Limits(**({"time_s": 10} | limits)), mode=mode)[0]


def printed(code, **settings):
    ended = run(code, **settings)
    assert (ended.how, ended.code) == ("exited", 0), ended
    return ended.stdout.decode().split("\n")[:-1]


def running(mark):
    """The processes of the machine whose command line holds a text."""
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            if mark.encode() in pathlib.Path(path).read_bytes():
                found.append(path)
        except OSError:
            pass
    return found


def soon_gone(mark):
    until = time.monotonic() + 10
    while running(mark) and time.monotonic() < until:
        time.sleep(0.02)
    return not running(mark)


def test_input_output_and_status():
    ended = run(
        "import sys\nprint(input())\nprint('no', file=sys.stderr)\nsys.exit(3)", given=b"x\n"
    )
    assert (ended.how, ended.code, ended.stdout, ended.stderr) == ("exited", 3, b"x\n", b"no\n")
    ended = run("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    assert (ended.how, ended.code) == ("killed", signal.SIGSEGV)


def test_namespaces_are_used_where_there_are_any():
    if not shutil.which("unshare"):
        pytest.skip("no program to ask the kernel with")
    flags = ["--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--mount-proc"]
    user = [] if os.geteuid() == 0 else ["--user"]
    if subprocess.run(["unshare", *user, *flags, "true"], capture_output=True).returncode:
        pytest.skip("this machine grants no namespaces")
    assert sandbox.available() == "namespaces"


@shut
def test_nothing_of_the_machine_is_seen(tmp_path):
    marker = pathlib.Path("/tmp") / f"marker_{os.getpid()}"
    marker.write_text("here")
    hidden = [pathlib.Path(__file__).parents[1] / "tests", tmp_path, marker, "/root/.bashrc"]
    hidden += ["/work/shared", "/work/main", "/home", "/etc/passwd", "/var", "/dev/tty", "/proc/1"]
    try:
        code = f"import os\nprint([p for p in {list(map(str, hidden))} if os.path.exists(p)])"
        assert printed(code) == ["[]"]
    finally:
        marker.unlink()
    assert printed("import os\nprint(os.listdir('.'), os.getcwd())") == ["[] /tmp"]
    assert set(printed("import os\nprint(*os.listdir('/'), sep='\\n')")) <= {
        "bin", "sbin", "lib", "lib32", "lib64", "usr", "etc", "proc", "dev", "tmp", "code",
        *(path.split("/")[1] for path in code_root.shown()),
    }  # fmt: skip


@shut
def test_nothing_but_the_working_folder_can_be_written():
    code = """
    import os
    for folder, _, _ in os.walk('/', followlinks=False):
        if folder.startswith(('/proc', '/tmp', '/dev/shm')) or folder.count('/') > 4:
            continue
        try:
            open(folder + '/written', 'w')
            print(folder)
        except OSError:
            pass
    open('here', 'w').write('1')
    try:
        os.remove('/code/main.py')
        print('removed')
    except OSError:
        pass
    """
    assert printed(code) == []


@shut
def test_there_is_no_network():
    code = """
    import socket
    for address in (('127.0.0.1', 9), ('192.0.2.1', 80)):
        with socket.socket() as one:
            one.settimeout(2)
            try:
                one.connect(address)
            except OSError as error:
                print(error.errno)
    print([name for _, name in socket.if_nameindex()])
    """
    assert printed(code) == ["101", "101", "['lo']"]


@shut
def test_no_connection_to_a_server_of_this_machine():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)"
        assert run(code).code == 1
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0xrpo{os.getpid()}")
        server.listen()
        code = f"import socket\nsocket.socket(socket.AF_UNIX).connect('\\0xrpo{os.getpid()}')"
        assert run(code).code == 1


@shut
def test_the_program_has_no_rights():
    code = """
    import ctypes, os
    status = dict(line.split(':\\t') for line in open('/proc/self/status') if ':\\t' in line)
    print(*(status['Cap' + name].strip() for name in ('Prm', 'Eff', 'Bnd', 'Amb')))
    print(status['NoNewPrivs'].strip(), os.getuid() != 0, os.getgroups())
    call = ctypes.CDLL(None, use_errno=True)
    for name, *args in (('unshare', 0x10000000), ('setuid', 0), ('chroot', b'/tmp'),
                        ('mount', b'a', b'/tmp', b'tmpfs', 0, None), ('ptrace', 16, 1, 0, 0)):
        print(name, getattr(call, name)(*args))
    for process in (1, os.getppid()):
        try:
            os.kill(process, 9)
            print('killed', process)
        except PermissionError:
            pass
    """
    nothing = " ".join(["0" * 16] * 4)
    assert printed(code) == [nothing, "1 True []"] + [
        f"{name} -1" for name in ("unshare", "setuid", "chroot", "mount", "ptrace")
    ]


@shut
@pytest.mark.skipif(not code_filter.program(), reason="no numbers of calls for this machine")
def test_the_filter_of_calls():
    code = """
    import ctypes, os, platform
    call = ctypes.CDLL(None, use_errno=True)
    numbers = {'x86_64': (435, 56, 29, 319), 'aarch64': (435, 220, 194, 279)}[platform.machine()]
    clone3, clone, shmget, memfd = numbers
    print(call.syscall(clone3, 0, 0), ctypes.get_errno())
    print(call.syscall(clone, 0x10000000 | 17, 0, 0, 0, 0), ctypes.get_errno())
    print(call.syscall(shmget, 0, 4096, 0o1600), ctypes.get_errno())
    print(call.syscall(memfd, b'x', 0), ctypes.get_errno())
    print(open('/proc/self/status').read().split('Seccomp:\\t')[1][0])
    """
    assert printed(code) == ["-1 38", "-1 1", "-1 1", "-1 1", "2"]


def test_the_environment_is_empty(monkeypatch):
    monkeypatch.setenv("SECRET", "7")
    monkeypatch.setenv("PYTHONSTARTUP", "/tmp/x")
    names = printed("import os\nprint(*os.environ, sep='\\n')")
    assert set(names) <= {*code_root.environment(), "LC_CTYPE"}
    assert printed("print(hash('a') == hash('a'), 'é')") == ["True é"]
    assert printed("print(hash('abc'))") == printed("print(hash('abc'))")


def test_installed_packages_come_after_the_library():
    paths = printed("import numpy, sys\nprint(numpy.ones(2).sum(), sys.flags.safe_path)")
    assert paths == ["2.0 True"]


MODES = ["namespaces", "limits"] if sandbox.available() == "namespaces" else ["limits"]


@pytest.mark.parametrize("mode", MODES)
def test_time_ends(mode):
    begun = time.monotonic()
    code = (
        "import signal\nfor s in (14, 15, 2, 24):\n    signal.signal(s, signal.SIG_IGN)\nwhile 1: 0"
    )
    assert run(code, mode=mode, time_s=0.5).how == "time"
    assert (
        run("import time\nprint(1, flush=True)\ntime.sleep(60)", mode=mode, time_s=0.5).how
        == "time"
    )
    assert time.monotonic() - begun < 8


@pytest.mark.parametrize("mode", MODES)
def test_memory_and_files_end(mode):
    code = "x = bytearray({} * 10**6)\nprint(len(x))"
    assert run(code.format(100), mode=mode, memory_mb=200).stdout == b"100000000\n"
    ended = run(code.format(300), mode=mode, memory_mb=200)
    assert ended.code == 1 and b"MemoryError" in ended.stderr
    code = "open('f', 'wb').write(b'x' * 10**6 * {})"
    assert run(code.format(1), mode=mode, file_kb=2048).code == 0
    assert run(code.format(3), mode=mode, file_kb=2048).code == 1


@shut
def test_all_files_together_end():
    code = "for i in range(30):\n    open(f'{}/{{i}}', 'wb').write(b'x' * 10**5)"
    for folder in (".", "/tmp", "/dev/shm"):
        assert run(code.format(folder), file_kb=1024).code == 1
    assert run(code.format("."), file_kb=4096).code == 0


@pytest.mark.parametrize("mode", MODES)
def test_output_ends_and_errors_never_block(mode):
    assert run("while 1: print('x' * 1000)", mode=mode, output_kb=64).how == "output"
    code = "import sys\nfor i in range(20000):\n    sys.stderr.write('w' * 99 + '\\n')\nprint(1)"
    ended = run(code, mode=mode, output_kb=64)
    assert (ended.how, ended.stdout, len(ended.stderr)) == ("exited", b"1\n", 8192)
    assert run("print('x' * 60000)", mode=mode, output_kb=64).stdout == b"x" * 60000 + b"\n"


FORKS = """
import os, time
count = 0
try:
    for i in range(20):
        if not os.fork():
            time.sleep(30)
            os._exit(0)
        count += 1
        time.sleep(0.05)
except BlockingIOError:
    pass
print(count)
"""


@shut
def test_processes_and_threads_end():
    assert printed(FORKS, processes=8) == ["7"]
    threads = """
    import threading, time
    count = 0
    try:
        for i in range(20):
            threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
            count += 1
    except RuntimeError:
        pass
    print(count)
    """
    assert printed(threads, processes=8) == ["7"]


def test_processes_are_counted_where_there_are_no_namespaces():
    ended = run(FORKS, mode="limits", processes=8)
    assert ended.how == "processes"


@pytest.mark.parametrize("mode", MODES)
def test_what_a_program_starts_ends_with_it(mode, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mark = f"4321{os.getpid()}"
    code = f"""
    import subprocess
    subprocess.Popen(['sleep', '{mark}'], start_new_session=True)
    subprocess.Popen(['sh', '-c', 'trap "" TERM; (setsid sleep {mark} &) ; sleep {mark}'])
    print(1)
    """
    assert printed(code, mode=mode) == ["1"]
    assert not running(mark)
    assert run(code + "\n    while 1: 0", mode=mode, time_s=0.5).how == "time"
    assert not running(mark)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", MODES)
def test_a_killed_grader_leaves_nothing(mode):
    mark = f"8765{os.getpid()}"
    grader = f"""
from xrpo_jax.verify import sandbox
code = b"import subprocess\\nsubprocess.run(['sleep', '{mark}'])"
program = sandbox.Program(files={{"main.py": code}}, stdin=sandbox.readable(b""))
sandbox.run([program], sandbox.Limits(time_s=60), mode={mode!r})
"""
    # Exact: a fork of the grader has its command line until it becomes the launcher.
    sleep = f"sleep\0{mark}\0"
    process = subprocess.Popen(
        [sys.executable, "-c", grader], cwd=pathlib.Path(__file__).parents[1]
    )
    try:
        until = time.monotonic() + 60
        while not running(sleep) and time.monotonic() < until:
            assert process.poll() is None
            time.sleep(0.02)
        assert running(sleep)
    finally:
        process.kill()
        process.wait()
    assert soon_gone(mark)


def test_a_program_without_root_runs_in_a_namespace_of_users(monkeypatch):
    if sandbox.available() != "namespaces":
        pytest.skip("this machine grants no namespaces")
    monkeypatch.setattr(code_root, "user", lambda mode: 0)
    code = """
    import os
    print(os.getuid(), os.listdir('/tmp'))
    for path in ('/proc/1/fd/4', '/proc/1/mem', '/proc/1/environ', '/proc/1/cwd/..'):
        try:
            os.close(os.open(path, os.O_RDONLY))
            print(path)
        except OSError:
            pass
    try:
        os.kill(-1, 9)
    except OSError:
        pass
    """
    assert printed(code) == ["1000 []"]
    status = "print(*(x for x in open('/proc/self/status') if x.startswith('CapEff')), end='')"
    assert printed(status) == ["CapEff:\t" + "0" * 16]


def test_the_state_of_a_run_is_not_shared():
    assert run("open('/tmp/left', 'w').write('1')\nprint(1)").stdout == b"1\n"
    assert printed("import os\nprint(os.path.exists('/tmp/left'))") == ["False"]


def test_threads_and_processes_at_once():
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda n: printed(f"print({n})"), range(12)))
    assert results == [[str(n)] for n in range(12)]
    code = "import sys\nfrom xrpo_jax.verify.code import grade_code\n"
    code += "v = grade_code('print(3)', [{'stdin': '', 'stdout': '3'}])\nprint(v.status, "
    code += "[name for name in ('jax', 'flax') if name in sys.modules])"
    graders = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            cwd=pathlib.Path(__file__).parents[1],
        )
        for _ in range(3)
    ]
    assert [grader.communicate()[0] for grader in graders] == [b"correct []\n"] * 3


def test_no_descriptor_is_left_or_given():
    before = len(os.listdir("/proc/self/fd"))
    held = os.open("/proc/self/status", os.O_RDONLY)
    os.set_inheritable(held, True)
    try:
        names = printed("import os\nprint(*sorted(map(int, os.listdir('/proc/self/fd'))))")
    finally:
        os.close(held)
    assert names == ["0 1 2 3"]  # 3 is the folder that is being listed
    run("while 1: 0", time_s=0.2)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_launcher_that_fails_is_told(monkeypatch):
    monkeypatch.setattr(code_root, "mount_point", lambda: "/no/such/folder")
    if sandbox.available() == "namespaces":
        ended = run("print(1)")
        assert ended.how == "failed" and "No such file" in ended.message
    monkeypatch.setattr(sandbox, "LAUNCHER", "/no/such/file.py")
    begun = time.monotonic()
    ended = run("print(1)", mode="limits")
    assert ended.how == "failed" and ended.message
    assert time.monotonic() - begun < 10


def test_where_nothing_works_grading_crashes(monkeypatch):
    from xrpo_jax.verify.code import grade_code

    monkeypatch.setattr(sandbox, "LAUNCHER", "/no/such/file.py")
    sandbox.available.cache_clear()
    try:
        with pytest.raises(OSError, match="namespaces"):
            sandbox.available()
        assert "not graded" in sandbox.describe()
        verdict = grade_code("print(3)", [{"stdin": "", "stdout": "3"}])
        assert (verdict.status, verdict.score) == ("crashed", 0.0)
    finally:
        sandbox.available.cache_clear()


def test_describe_says_what_holds(monkeypatch):
    for mode, words in (
        ("namespaces", "no network"),
        ("other user", "NOT shut off"),
        ("limits", "may read the tests"),
    ):
        monkeypatch.setattr(sandbox, "available", lambda mode=mode: mode)
        assert words in sandbox.describe()


@pytest.mark.parametrize(
    ("limit", "value"),
    [
        ("time_s", 0),
        ("time_s", "3"),
        ("memory_mb", 4),
        ("processes", 1),
        ("output_kb", 0),
        ("file_kb", 2.5),
        ("file_kb", True),
    ],
)
def test_a_wrong_limit_is_named(limit, value):
    with pytest.raises(ValueError, match=f"{limit}=.*allowed"):
        Limits(**{limit: value})


def test_many_lines_of_a_program_that_never_ends_a_line():
    heard = []
    program = Program(files={"main.py": b"print('a\\nb\\nc')"}, stdin=sandbox.readable(b""))
    (ended,) = sandbox.run(
        [program], Limits(), on_line=lambda line: heard.append(line) or json.loads('"next"')
    )
    assert heard == [b"a", b"b", b"c"] and ended.how == "exited"
