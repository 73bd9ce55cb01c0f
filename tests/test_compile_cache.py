"""Where compiled functions are kept, and that a folder that cannot be written stops nothing."""

import pathlib

import jax
import numpy as np
import pytest

from xrpo_jax import compile_cache
from xrpo_jax.log import Compiles

NAMES = [name.lower() for name in (compile_cache.FOLDER, *compile_cache.LEAST)]
BEFORE = [getattr(jax.config, name) for name in NAMES]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    """Settings of the environment are of whoever starts the tests."""
    for name in (compile_cache.FOLDER, *compile_cache.LEAST):
        monkeypatch.delenv(name, raising=False)


def test_the_folder_is_the_setting_s_the_environment_s_or_the_user_s(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    folder_of = compile_cache.folder_of
    assert folder_of("auto") == pathlib.Path("/home/someone/.cache/xrpo_jax/jax")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert folder_of("auto") == pathlib.Path("/cache/xrpo_jax/jax")
    monkeypatch.setenv(compile_cache.FOLDER, "/elsewhere")
    assert folder_of("auto") == pathlib.Path("/elsewhere")
    assert folder_of("~/mine") == pathlib.Path("/home/someone/mine")
    assert folder_of("no") is folder_of("") is None
    monkeypatch.setenv(compile_cache.FOLDER, "")
    assert folder_of("auto") is None


def test_small_functions_are_kept_and_found(tmp_path):
    folder = tmp_path / "a" / "b"
    assert compile_cache.keep(str(folder)) == folder

    def compiled():
        counter = Compiles()
        jax.jit(lambda x: x * 7 + 3)(np.ones(5, np.float32))
        counter.close()
        return counter.take()

    first = compiled()
    assert any(folder.iterdir()) and first.cached == 0 and first.seconds > 0
    jax.clear_caches()
    again = compiled()
    assert again.cached == len(again.names) == len(first.names) and again.names == first.names


def test_nothing_is_kept_unless_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv(compile_cache.FOLDER, str(tmp_path))
    assert compile_cache.keep("no") is None
    jax.jit(lambda x: x * 5 - 3)(np.ones(5, np.float32))
    assert not list(tmp_path.iterdir()) and jax.config.jax_compilation_cache_dir is None


def test_a_folder_that_cannot_be_written_warns_and_the_run_goes_on(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    setting = str(tmp_path / "file" / "cache")
    assert compile_cache.keep(setting) is None
    said = capsys.readouterr().err
    assert f"WARNING: compile.cache_dir='{setting}': " in said and "is not kept" in said
    assert jax.config.jax_compilation_cache_dir is None
    assert jax.jit(lambda x: x * 3 - 3)(np.ones(5, np.float32))[0] == 0


@pytest.mark.parametrize("setting", ["auto", "~nobody_here/cache"])
def test_without_a_home_the_run_goes_on(monkeypatch, capsys, setting):
    def unknown(user):
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("getpwuid", "getpwnam"):
        monkeypatch.setattr(f"pwd.{name}", unknown)
    assert compile_cache.keep(setting) is None
    said = capsys.readouterr().err
    assert f"WARNING: compile.cache_dir='{setting}': Could not determine home" in said
    assert jax.config.jax_compilation_cache_dir is None


def test_limits_of_the_environment_are_left(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "60")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 60.0)
    compile_cache.keep(str(tmp_path))
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 60
    assert jax.config.jax_persistent_cache_min_entry_size_bytes == -1


def test_what_the_tests_above_changed_ended_with_them():
    assert [getattr(jax.config, name) for name in NAMES] == BEFORE
