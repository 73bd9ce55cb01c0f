"""What is chosen by the kind of machine."""

import os

import jax
import pytest

from xrpo_jax import machine


def use(monkeypatch, backend: str, cores: int) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)


@pytest.mark.parametrize(
    "cores, devices, expected", [(1, 1, 1), (2, 1, 2), (2, 2, 1), (2, 8, 1), (16, 1, 4), (6, 2, 3)]
)
def test_a_lane_for_each_core_that_the_process_may_use(monkeypatch, cores, devices, expected):
    use(monkeypatch, "cpu", cores)
    assert machine.lanes(devices) == expected
    assert machine.cores() == cores
    assert not machine.scatters()


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_an_accelerator_runs_one_program_at_a_time(monkeypatch, backend):
    use(monkeypatch, backend, 16)
    assert machine.lanes(1) == 1
    assert machine.scatters()


def test_all_cores_where_the_system_does_not_say_which(monkeypatch):
    use(monkeypatch, "cpu", 2)
    monkeypatch.delattr(os, "sched_getaffinity")
    assert machine.cores() == 64


def test_memory_is_given_back_where_the_library_can(monkeypatch):
    machine.give_memory_back()
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: object())
    machine.give_memory_back()
