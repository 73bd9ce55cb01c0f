"""The pool of graders: what hangs, crashes, floods or is killed costs its own item at most."""

import contextlib
import gc
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types

import pool_functions as graders
import pytest

from xrpo_jax.types import Verdict
from xrpo_jax.verify import pool as pools
from xrpo_jax.verify.pool import Pool
from xrpo_jax.verify.worker import inside_worker

HERE = pathlib.Path(__file__).parent
DEADLINE = 0.5
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture(scope="module")
def pool():
    """Two workers that do what an item says."""
    with Pool(graders.act, workers=2, deadline=DEADLINE, memory_mb=1024) as made:
        made.map([("echo", 0)])  # the imports are no part of what is timed
        yield made


def alive(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def gone(pids, seconds: float = 3.0) -> bool:
    """Whether all have ended within `seconds`."""
    pids, limit = list(pids), time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True


def children(pid: int) -> list[int]:
    found = []
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


def lines(path) -> list[str]:
    return pathlib.Path(path).read_text().split()


def echoes(count: int, start: int = 0) -> list[tuple]:
    return [("echo", value) for value in range(start, start + count)]


def reasons(verdicts) -> list[str]:
    return [verdict.reason for verdict in verdicts]


def script(folder, text: str, *arguments: str, wait: bool = True, **settings):
    """Run a script of its own, with no guard, in a folder where tests' modules are not."""
    file = folder / "script.py"
    head = f"import sys\nsys.path.insert(0, {str(HERE)!r})\nimport pool_functions as graders\n"
    file.write_text(head + "from xrpo_jax.verify.pool import Pool\n" + textwrap.dedent(text))
    command = [sys.executable, *(arguments or (str(file),))]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, **settings
    )
    if not wait:
        return child
    return child.communicate(timeout=60)[0]


# --- the plain way ---------------------------------------------------------------------------


def test_order_is_kept(pool):
    uneven = [("sleep", 0.02 * (place % 3 == 0), place) for place in range(40)]
    assert reasons(pool.map(uneven)) == [str(place) for place in range(40)]
    assert pool.map([]) == []


def test_a_method_of_a_record_grades():
    task = graders.Task(answers=tuple(str(i) for i in range(5000)))
    with Pool(task.rewards, workers=1) as pool:
        verdicts = pool.map([(4, "4"), (4999, "x")])
    assert [verdict.status for verdict in verdicts] == ["correct", "wrong"]
    assert [verdict.score for verdict in verdicts] == [1.0, 0.0]


def test_a_worker_is_alone_quiet_and_without_jax(pool):
    found = json.loads(pool.map([("surroundings",)])[0].reason)
    assert not found["jax"] and found["inside"] and not inside_worker()
    assert found["group"] and found["session"] not in (0, os.getsid(0))
    assert found["core"] == [0, 0] and found["outputs"] == ["/dev/null"] * 3
    assert found["descriptors"] <= 5 and found["inheritable"] == [] and found["threads"] == 1


def test_signals_that_the_caller_blocks_are_free_in_a_worker():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    try:
        with Pool(graders.act, workers=1) as pool:
            assert json.loads(pool.map([("surroundings",)])[0].reason)["blocked"] == []
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_prints_cost_nothing_and_input_is_empty(pool, capfd):
    (verdict,) = pool.map([("print_much",)])
    assert verdict.correct and verdict.reason == "''"
    assert capfd.readouterr() == ("", "")


def test_big_items_and_long_reasons():
    with Pool(graders.act, workers=2, deadline=10) as pool:
        items = [("length", letter * 20_000_000) for letter in "abc"]
        assert reasons(pool.map(items)) == ["20000000"] * 3
        (verdict,) = pool.map([("long_reason",)])
    assert verdict.correct and len(verdict.reason) == 1000


def test_equal_items_are_graded_once_and_remembered(tmp_path):
    path = str(tmp_path / "count")
    with Pool(graders.noted, workers=2, cache=3) as pool:
        first = pool.map([(path, value) for value in (1, 2, 1, 2, 3)])
        assert reasons(first) == ["1", "2", "1", "2", "3"] and sorted(lines(path)) == list("123")
        pool.map([(path, 1), (path, 3)])
        assert len(lines(path)) == 3
        pool.map([(path, 4)])  # the oldest that was not asked for again, 2, goes
        pool.map([(path, 1), (path, 3), (path, 4)])
        assert len(lines(path)) == 4
        pool.map([(path, 2)])
        assert len(lines(path)) == 5
        pool.map([(path, [5]), (path, [5])])  # not hashable
        assert len(lines(path)) == 6


def test_failures_are_not_remembered(tmp_path):
    path = str(tmp_path / "count")
    with Pool(graders.noted, workers=1) as pool:
        for status in ("raise", "timed_out", "wrong", "unparsed"):
            found = [pool.map([(path, status, status)] * 2) for _ in range(2)]
            assert found[0] == found[1]
            assert found[0][0].status == {"raise": "crashed"}.get(status, status)
    assert lines(path) == ["raise", "raise", "timed_out", "timed_out", "wrong", "unparsed"]


def test_no_memory_across_calls_where_none_is_wanted(tmp_path):
    path = str(tmp_path / "count")
    with Pool(graders.noted, workers=1, cache=0) as pool:
        pool.map([(path, 1), (path, 1)])
        pool.map([(path, 1)])
    assert len(lines(path)) == 2


def test_two_threads_at_once(pool):
    found = {}

    def run(start):
        for turn in range(5):
            place = start + 100 * turn
            found[place] = reasons(pool.map(echoes(100, place)))

    threads = [threading.Thread(target=run, args=(start,)) for start in (10_000, 20_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 10
    for start, said in found.items():
        assert said == [str(value) for value in range(start, start + 100)]


def test_start_and_throughput(capsys):
    began = time.perf_counter()
    with Pool(graders.echo, workers=2, modules=("sympy", "latex2sympy2_extended")) as pool:
        built = time.perf_counter() - began
        pool.map([("warm",)])
        warm = time.perf_counter() - began
        began = time.perf_counter()
        verdicts = pool.map([(value,) for value in range(5000)])
        rate = 5000 / (time.perf_counter() - began)
    with capsys.disabled():
        print(f"\npool: built in {built * 1e3:.0f} ms, warm in {warm:.2f} s, {rate:.0f} items/s")
    assert reasons(verdicts) == [str(value) for value in range(5000)]
    assert built < 0.5 and warm < 15 and rate > 1000  # 3 ms, 0.8 s, 25,000 where it is quiet


# --- one item at a time ----------------------------------------------------------------------


def test_a_stream_grades_while_items_are_handed_in(pool, tmp_path):
    path = tmp_path / "count"
    with Pool(graders.noted, workers=2) as own, own.begin() as stream:
        for place in range(5):
            stream.add((str(path), place % 4))
            limit = time.monotonic() + 20  # it is graded before the next is there
            while not path.exists() or len(lines(path)) < min(place + 1, 4):
                assert time.monotonic() < limit
                time.sleep(0.01)
        assert reasons(stream.verdicts()) == list("01230")
        stream.add((str(path), 1))
        assert reasons(stream.verdicts()) == list("012301") and len(lines(path)) == 4
        assert stream.hidden > 0


def test_adding_waits_for_nobody(pool):
    with pool.begin() as stream:
        for item in (("hang",), ("stop_myself",), *echoes(200)):
            stream.add(item)
        assert stream._working  # all were taken while the first two hang
        verdicts = stream.verdicts()
    assert [verdict.status for verdict in verdicts[:2]] == ["timed_out"] * 2
    assert reasons(verdicts[2:]) == [str(value) for value in range(200)]


def test_streams_take_turns(pool):
    with pool.begin() as one, pool.begin() as other:
        for value in range(50):
            one.add(("echo", value))
            other.add(("echo", -value))
        assert reasons(pool.map(echoes(3, 90))) == ["90", "91", "92"]
        assert reasons(other.verdicts()) == [str(-value) for value in range(50)]
        assert reasons(one.verdicts()) == [str(value) for value in range(50)]


def test_a_stream_that_is_given_up_ends_its_workers():
    with Pool(graders.act, workers=2, deadline=60) as pool:
        pool.map(echoes(2))
        with pool.begin() as stream:
            for item in (("hang",), ("hang_in_c",), ("echo", 1)):
                stream.add(item)
            zygote = pool._zygote.process.pid
            limit = time.monotonic() + 20
            while len(children(zygote)) < 2:
                assert time.monotonic() < limit
                time.sleep(0.01)
            pids = [zygote, *children(zygote)]
        assert gone(pids) and reasons(pool.map(echoes(2, 7))) == ["7", "8"]
        for ask in (stream.verdicts, lambda: stream.add(("echo", 2))):
            with pytest.raises(RuntimeError):
                ask()


def test_closing_the_pool_ends_a_stream():
    pool = Pool(graders.act, workers=1, deadline=60)
    with pool.begin() as stream:
        stream.add(("hang",))
        pool.close()
        for ask in (stream.verdicts, lambda: stream.add(("echo", 2)), pool.begin):
            with pytest.raises(RuntimeError, match="the pool is closed"):
                ask()


def test_a_stream_says_what_is_wrong(tmp_path):
    with Pool(graders.echo, workers=1, modules=("no_such",)) as pool, pool.begin() as stream:
        with pytest.raises(ValueError, match="item 0 cannot be sent to a worker"):
            stream.add((lambda: 1,))
        stream.add((1,))
        for ask in (stream.verdicts, lambda: stream.add((2,))):
            with pytest.raises(ValueError, match="modules='no_such'"):
                ask()


def test_a_stream_that_nobody_asks_ends_by_itself():
    pool = Pool(graders.echo, workers=1)
    stream = pool.begin()
    stream.add((1,))
    assert reasons(stream.verdicts()) == ["1"]
    stream.add((2,))
    pid = pool._zygote.process.pid
    del stream, pool
    limit = time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < limit
        gc.collect()
        time.sleep(0.01)


# --- what hangs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        "hang",
        "hang_in_c",
        "hang_in_power",
        "ignore_signals",
        "stop_myself",
        "half_a_reply",
        "half_a_header",
        "stop_the_zygote",
    ],
)
def test_what_hangs_times_out(pool, kind):
    began = time.monotonic()
    verdicts = pool.map([(kind,), *echoes(20)])
    assert time.monotonic() - began <= DEADLINE * 11 + 1
    assert (verdicts[0].status, verdicts[0].score) == ("timed_out", 0.0)
    assert verdicts[0].reason == "not done within 0.5 s"
    assert reasons(verdicts[1:]) == [str(value) for value in range(20)]
    assert pool.map([("echo", kind)])[0].correct


def test_a_stopped_zygote_still_ends_its_workers(pool):
    pool.map([("sleep", 0.05, value) for value in range(2)])  # both workers are there
    time.sleep(0.1)
    assert pool.map([("stop_the_zygote",)])[0].status == "timed_out"
    zygote = pool._zygote.process.pid
    limit = time.monotonic() + 3
    while len(children(zygote)) > 1:  # the other worker stays
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_the_bound_holds_whatever_hangs(pool):
    began = time.monotonic()
    verdicts = pool.map([("hang",), ("stop_myself",), *(("sleep", 60, i) for i in range(6))])
    took = time.monotonic() - began
    assert [verdict.status for verdict in verdicts] == ["timed_out"] * 8
    assert DEADLINE * 4 - 0.1 <= took <= DEADLINE * 4 + 1


def test_a_big_item_for_one_who_does_not_read():
    with Pool(graders.act, workers=1, deadline=DEADLINE) as pool:
        pool.map(echoes(1))
        (worker,) = children(pool._zygote.process.pid)
        os.kill(worker, signal.SIGSTOP)
        began = time.monotonic()
        verdicts = pool.map([("length", "x" * 30_000_000), ("echo", 1)])
        took = time.monotonic() - began
    assert [verdict.status for verdict in verdicts] == ["timed_out", "correct"]
    assert took <= 2 * DEADLINE + 1


def test_a_reply_that_came_while_the_caller_was_held_up_counts(pool):
    before = signal.signal(signal.SIGALRM, lambda *_: time.sleep(1))
    try:
        pool.map(echoes(2))
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        assert pool.map([("sleep", 0.3, "held up")])[0].reason == "held up"
    finally:
        signal.signal(signal.SIGALRM, before)


def test_the_deadline_is_over_all_attempts(tmp_path):
    path = str(tmp_path / "count")
    with Pool(graders.act, workers=1, deadline=DEADLINE) as pool:
        pool.map(echoes(1))
        began = time.monotonic()
        (verdict,) = pool.map([("sleep_then_exit", path, 0.3)])
        took = time.monotonic() - began
    assert verdict.status == "timed_out" and took < 1.5
    assert len(lines(path)) == 2


def test_children_end_with_their_worker(pool, tmp_path):
    path = str(tmp_path / "pids")
    (verdict,) = pool.map([("leave_children", path)])
    assert verdict.status == "timed_out" and len(lines(path)) == 3
    assert gone(map(int, lines(path)))
    (verdict,) = pool.map([("children_then_exit", str(tmp_path / "more"))])
    assert verdict.status == "crashed" and len(lines(tmp_path / "more")) == 3
    assert gone(map(int, lines(tmp_path / "more")))


# --- what crashes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, reason",
    [
        ("exit_three", "the worker ended with exit code 3 (3 attempts)"),
        ("segfault", "the worker was killed by SIGSEGV (3 attempts)"),
        ("raise_long", "ValueError: " + "x" * 188),
        ("raise_unsayable", "Odd"),
        ("leave_python", "SystemExit: bye"),
        ("too_much", "MemoryError"),
        ("return_dict", "TypeError: the grader returned a dict; allowed: Verdict"),
        ("other_number", "the worker "),
        ("long_reply", "the worker "),
        ("flood", "the worker "),
        ("close_everything", "the worker was killed by SIGKILL (from outside"),
    ],
)
def test_what_crashes_says_why(pool, kind, reason):
    verdicts = pool.map([(kind,), *echoes(20)])
    assert (verdicts[0].status, verdicts[0].score) == ("crashed", 0.0)
    assert verdicts[0].reason.startswith(reason) and len(verdicts[0].reason) <= 200
    assert reasons(verdicts[1:]) == [str(value) for value in range(20)]
    assert reasons(pool.map(echoes(4, 50))) == ["50", "51", "52", "53"]


@pytest.mark.parametrize(
    "body",
    [
        b'["correct", NaN, ""]',
        b'["correct", 2.0, ""]',
        b'["correct", "1", ""]',
        b'["correct", true, ""]',
        b'["correct", 1.0, 5]',
        b'["right", 1.0, ""]',
        b'[["correct"], 1.0, ""]',
        b"[]",
        b'{"status": 1}',
        b"3",
        b"\xff\xfe",
        b"[" * 60_000,
        b"",
    ],
)
def test_replies_of_a_wrong_shape(pool, body):
    verdicts = pool.map([("forge", body), *echoes(6)])
    assert verdicts[0].status == "crashed" and "wrong shape" in verdicts[0].reason
    assert reasons(verdicts[1:]) == [str(value) for value in range(6)]


def test_garbage_on_every_descriptor(pool):
    verdicts = pool.map([("garbage_everywhere",), *echoes(20)])
    assert verdicts[0].status == "crashed"
    assert reasons(verdicts[1:]) == [str(value) for value in range(20)]


def test_what_comes_late_or_twice_hurts_nobody(pool):
    for kind, reason in (("garbage_later", "first"), ("go_on_in_a_fork", "parent")):
        assert reasons(pool.map([(kind,), *echoes(5)]))[0] == reason
        time.sleep(0.2)
        assert reasons(pool.map(echoes(20, 30))) == [str(value) for value in range(30, 50)]


def test_memory_ends_at_the_limit():
    # The harmless probe first: 100 MiB more than allowed must fail before a bomb is tried.
    with Pool(graders.act, workers=1, deadline=5, memory_mb=600) as own:
        verdicts = own.map([("reserve", 100), ("reserve", 700), ("reserve", 101)])
        assert [verdict.status for verdict in verdicts] == ["correct", "crashed", "correct"]
        assert verdicts[1].reason == "MemoryError"
        (verdict,) = own.map([("bomb",)])
        assert (verdict.status, verdict.reason) == ("crashed", "MemoryError")


def test_a_worker_that_has_grown_is_replaced():
    with Pool(graders.act, workers=1, memory_mb=600) as pool:
        pool.map([("keep", 400)])
        before = children(pool._zygote.process.pid)
        pool.map(echoes(200))
        (verdict,) = pool.map([("reserve", 300)])
        assert verdict.correct and children(pool._zygote.process.pid) != before


def test_the_third_attempt_counts_and_there_is_no_fourth(tmp_path):
    with Pool(graders.dies_at_first, workers=1) as pool:
        for times, status in ((2, "correct"), (3, "crashed")):
            path = str(tmp_path / str(times))
            (verdict,) = pool.map([(path, times, "done")])
            assert verdict.status == status
            assert len(set(lines(path))) == len(lines(path)) == 3
        assert verdict.reason == "the worker ended with exit code 7 (3 attempts)"


# --- who is killed ---------------------------------------------------------------------------


def test_killing_workers_loses_nothing():
    draw, over, killed = random.Random(0), threading.Event(), []
    with Pool(graders.slow_echo, workers=2) as pool:
        pool.map([("warm",)])

        def kill():
            while not over.wait(0.1):
                pids = children(pool._zygote.process.pid)
                with contextlib.suppress(OSError, IndexError):
                    os.kill(draw.choice(pids), signal.SIGKILL)
                    killed.append(1)

        thread = threading.Thread(target=kill)
        thread.start()
        verdicts = pool.map([(value,) for value in range(5000)])
        over.set()
        thread.join()
    assert len(killed) > 5
    assert [verdict.status for verdict in verdicts] == ["correct"] * 5000
    assert reasons(verdicts) == [str(value) for value in range(5000)]


def test_killing_the_zygote_loses_nothing():
    with Pool(graders.sleep, workers=2, deadline=5) as pool:
        pool.map([(0, "warm")])
        seen = set()

        def kill():
            for _ in range(3):
                time.sleep(0.4)
                seen.add(pool._zygote.process.pid)
                os.kill(pool._zygote.process.pid, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        verdicts = pool.map([(0.002, value) for value in range(1000)])
        thread.join()
        assert reasons(verdicts) == [str(value) for value in range(1000)]
        workers = children(pool._zygote.process.pid)
        os.kill(pool._zygote.process.pid, signal.SIGKILL)  # between two calls
        assert reasons(pool.map([(0, "after")])) == ["after"]
        assert gone(workers) and len(seen) >= 2


def test_one_who_kills_the_zygote_crashes_in_the_end(pool):
    verdicts = pool.map([*echoes(10), ("kill_the_zygote",), *echoes(10, 10)])
    assert verdicts[10].status == "crashed" and "process that starts" in verdicts[10].reason
    assert reasons(verdicts[:10] + verdicts[11:]) == [str(value) for value in range(20)]


def test_many_deaths_leave_no_descriptor_and_no_zombie():
    with Pool(graders.act, workers=2, deadline=5) as pool:
        pool.map([*echoes(2), ("exit_three",)])
        zygote = pool._zygote.process.pid

        def held():
            return [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), zygote)]

        before = held()
        verdicts = pool.map([("exit_now", value) for value in range(100)])
        assert {verdict.status for verdict in verdicts} == {"crashed"}
        pool.map(echoes(2, 10))
        gc.collect()
        # 300 deaths; two slots may hold two sockets each more than before.
        assert all(now <= then + 4 for now, then in zip(held(), before, strict=True))
        assert len(children(zygote)) <= 2 and pool._zygote.process.pid == zygote
    assert gone([zygote]) and not os.path.exists(f"/proc/{zygote}")


def test_close_and_forgetting_end_everything():
    before = len(os.listdir("/proc/self/fd"))
    for forget in (False, True):
        pool = Pool(graders.act, workers=2, deadline=30)
        pool.map([("echo", 1), ("echo", 2)])
        pids = [pool._zygote.process.pid, *children(pool._zygote.process.pid)]
        assert len(pids) == 3
        if forget:
            del pool
            gc.collect()
        else:
            pool.close()
            pool.close()
            with pytest.raises(RuntimeError, match="closed"):
                pool.map([("echo", 1)])
        assert gone(pids) and not os.path.exists(f"/proc/{pids[0]}")
    Pool(graders.act).close()  # at once, in the middle of its imports
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("how", ["caller", "caller and zygote", "caller with a fork"])
def test_nothing_outlives_the_caller(tmp_path, how):
    path = tmp_path / "pids"
    first = ("ignore_signals",) if how == "caller and zygote" else ("leave_children", str(path))
    text = f"""
        import os, time
        pool = Pool(graders.act, workers=2, deadline=60)
        pool.map([("echo", 1)])
        child = 0
        if {how == "caller with a fork"}:  # which keeps the sockets open
            child = os.fork()
            if child == 0:
                time.sleep(60)
        print(pool._zygote.process.pid, child, flush=True)
        pool.map([{first}, ("hang_in_c",)])
    """
    child = script(tmp_path, text, wait=False)
    zygote, fork = map(int, child.stdout.readline().split())
    limit = time.monotonic() + 20
    expected = 3 if first[0] == "leave_children" else 0
    while len(children(zygote)) < 2 or (expected and not (path.exists() and len(lines(path)) == 3)):
        assert time.monotonic() < limit
        time.sleep(0.02)
    time.sleep(0.2)
    pids = {zygote, *children(zygote), *(map(int, lines(path)) if expected else ())}
    assert len(pids) == (5 if expected else 3) and all(alive(pid) for pid in pids)
    child.kill()
    if how == "caller and zygote":
        os.kill(zygote, signal.SIGKILL)
    child.wait()
    ended = gone(pids, 2)
    if fork:
        os.kill(fork, signal.SIGKILL)
    assert ended


def test_nothing_outlives_the_interpreter(tmp_path):
    text = """
        pool = Pool(graders.act, workers=2)
        assert pool.map([("echo", 1)])[0].correct
        zygote = pool._zygote.process.pid
        print(zygote, open(f"/proc/{zygote}/task/{zygote}/children").read())
    """
    pids = [int(pid) for pid in script(tmp_path, text).split()]
    assert len(pids) == 2 and gone(pids, 1)


def test_an_interrupt_leaves_the_pool_usable(tmp_path):
    text = """
        import os, signal, threading, time
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
        pool = Pool(graders.act, workers=2, deadline=30)
        pool.map([("echo", 1)])
        old = pool._zygote.process.pid
        timer = threading.Timer(0.3, os.killpg, (os.getpgid(0), signal.SIGINT))
        for items in ([("hang",), ("sleep", 60, 1)], [("echo", 2)]):
            if timer.ident is None: timer.start()
            try:
                print([verdict.reason for verdict in pool.map(items)])
            except KeyboardInterrupt:
                print("interrupted", os.path.exists(f"/proc/{old}"))
        # A terminal's Ctrl-C goes to the caller's whole group: no worker may be in it.
        def processes():
            zygote = pool._zygote.process.pid
            return zygote, open(f"/proc/{zygote}/task/{zygote}/children").read()
        before = processes()
        signal.signal(signal.SIGINT, lambda *_: None)
        os.killpg(os.getpgid(0), signal.SIGINT)
        time.sleep(0.1)
        print(pool.map([("echo", 3)])[0].reason, before == processes())
    """
    said = script(tmp_path, text, start_new_session=True)
    assert said.splitlines() == ["interrupted False", "['2']", "3 True"]


def test_a_fork_of_the_caller_does_no_harm(tmp_path):
    text = """
        import os
        pool = Pool(graders.act, workers=1)
        pool.map([("echo", 1)])
        if os.fork() == 0:
            try:
                pool.map([("echo", 2)])
            except RuntimeError as error:
                print(error, flush=True)
            pool.close()
            del pool
            sys.exit()
        os.wait()
        old = pool._zygote.process.pid
        print(pool.map([("echo", 3)])[0].reason, pool._zygote.process.pid == old)
    """
    said = script(tmp_path, text).splitlines()
    assert said == ["the pool is closed, or belongs to another process", "3 True"]


# --- how it is started -----------------------------------------------------------------------


def test_a_script_without_a_guard_and_other_ways(tmp_path):
    (tmp_path / "beside.py").write_text("from pool_functions import echo as grade\n")
    text = """
        import beside
        with Pool(beside.grade, workers=1) as pool:
            print(__name__, pool.map([("here",)])[0].reason)
    """
    assert script(tmp_path, text) == "__main__ here\n"
    assert script(tmp_path, text, "-m", "script") == "__main__ here\n"
    assert script(tmp_path, text, "-c", "import script") == "script here\n"


def test_a_function_of_main_is_refused(tmp_path):
    text = """
        import dataclasses, functools
        def grade(value): return graders.echo(value)
        @dataclasses.dataclass
        class Record:
            def rewards(self, value): return graders.echo(value)
        for one in (grade, Record().rewards, functools.partial(graders.echo, grade)):
            try:
                Pool(one)
            except ValueError as error:
                print(error)
    """
    said = script(tmp_path, text).splitlines()
    assert len(said) == 3
    for line, name in zip(said, ("grade", "Record", "grade"), strict=True):
        assert f"{name} is defined in __main__; allowed: a function of an importable" in line
    assert said[0].startswith("grade=__main__.grade cannot be sent to a worker: ")


def test_what_does_not_pickle_is_refused():
    def local(value):
        return Verdict(status="correct", score=1.0)

    for grade in (lambda value: local(value), local):
        with pytest.raises(ValueError, match=r"grade=.*<locals>.*cannot be sent.*allowed: a funct"):
            Pool(grade)


def test_what_the_worker_cannot_import_is_refused_before_any_grading(monkeypatch):
    only_here = types.ModuleType("only_here")
    monkeypatch.setitem(sys.modules, "only_here", only_here)
    exec("def grade(value): pass", only_here.__dict__)
    with Pool(only_here.grade, workers=1) as pool:
        for _ in range(2):  # again in the next call
            with pytest.raises(ValueError, match="grade=only_here.grade .*No module named 'only_h"):
                pool.map([(1,)])
    with Pool(graders.echo, modules=("json", "no_such")) as pool:
        with pytest.raises(ValueError, match="modules='no_such': ModuleNotFoundError: No module"):
            pool.map([(1,)])


def test_a_module_that_ends_the_process_is_an_error(tmp_path, monkeypatch):
    text = "import os, sys\nprint('sorry', file=sys.stderr, flush=True)\nos._exit(5)\n"
    (tmp_path / "ends_it.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with Pool(graders.echo, modules=("ends_it",)) as pool:
        with pytest.raises(RuntimeError, match=r"while it started: sorry \(exit code 5\)"):
            pool.map([(1,)])


def patched_fork(folder, body: str) -> tuple[str, str]:
    """A module that makes the zygote's forks do `body` first, and the file that counts them."""
    count = str(folder / "count")
    text = f"""
        import os, time
        real = os.fork
        def fork():
            with open({count!r}, "a") as file:
                file.write("1 ")
            with open({count!r}) as file:
                times = len(file.read().split())
            {body}
            return real()
        os.fork = fork
    """
    (folder / "patched.py").write_text(textwrap.dedent(text))
    return count, "patched"


@pytest.mark.parametrize("failures, status", [(2, "correct"), (99, "crashed")])
def test_a_fork_that_fails_is_tried_again(tmp_path, monkeypatch, failures, status):
    body = f"if times <= {failures}: raise OSError('no process left')"
    count, module = patched_fork(tmp_path, body)
    monkeypatch.syspath_prepend(tmp_path)
    with Pool(graders.echo, workers=1, modules=(module,)) as pool:
        (verdict,) = pool.map([(1,)])
    assert verdict.status == status and len(lines(count)) == 3
    if status == "crashed":
        assert verdict.reason == "no worker: no process left (3 attempts)"


def test_a_zygote_that_says_nothing_is_replaced(tmp_path, monkeypatch):
    count, module = patched_fork(tmp_path, "if times == 1: time.sleep(30)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(pools, "SILENCE_LIMIT", 0.3)
    with Pool(graders.echo, workers=1, modules=(module,)) as pool:
        pids = {pool._zygote.process.pid}
        assert pool.map([(1,)])[0].correct
        pids.add(pool._zygote.process.pid)
    assert len(pids) == 2 and len(lines(count)) == 2 and gone(pids)


def test_imports_without_end_are_an_error(tmp_path, monkeypatch):
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(pools, "START_LIMIT", 0.3)
    with Pool(graders.echo, modules=("endless",)) as pool:
        with pytest.raises(RuntimeError, match="not imported within 0.3 s"):
            pool.map([(1,)])


def test_a_limit_below_the_imports_is_an_error():
    with Pool(graders.echo, memory_mb=20) as pool:
        with pytest.raises(ValueError, match="memory_mb=20; allowed: at least .* the imports take"):
            pool.map([(1,)])


def test_items_are_checked_before_any_grading(tmp_path):
    path = str(tmp_path / "count")
    with Pool(graders.noted, workers=1) as pool:
        with pytest.raises(ValueError, match="item 1 cannot be sent to a worker.*allowed: tuples"):
            pool.map([(path, 1), (path, lambda: 1)])
        with pytest.raises(ValueError, match="item 1 .* a list; allowed: tuples"):
            pool.map([(path, 1), [path, 1]])
    assert not os.path.exists(path)


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"workers": -1}, "workers=-1; allowed: 0"),
        ({"workers": 1.5}, "workers=1.5; allowed: 0"),
        ({"deadline": 0}, "deadline=0; allowed: above 0"),
        ({"deadline": float("nan")}, "deadline=nan; allowed: above 0"),
        ({"deadline": float("inf")}, "deadline=inf; allowed: above 0"),
        ({"deadline": "5"}, "deadline='5'; allowed: above 0"),
        ({"memory_mb": 0}, "memory_mb=0; allowed: a whole number above 0"),
        ({"cache": -1}, "cache=-1; allowed: 0"),
        ({"modules": "sympy"}, "modules='sympy'; allowed: names"),
        ({"modules": 3}, "modules=3; allowed: names"),
        ({"modules": (1,)}, "modules=.*; allowed: names"),
        ({"grade": 3}, "grade=3; allowed: a function"),
    ],
)
def test_settings_are_checked(settings, text):
    with pytest.raises(ValueError, match=text):
        Pool(**({"grade": graders.echo} | settings))


def test_workers_are_as_many_as_the_cores():
    with Pool(graders.echo) as pool:
        assert len(pool._zygote.slots) == min(len(os.sched_getaffinity(0)), 8)
