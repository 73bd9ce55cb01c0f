"""Imports point one way, and jax and randomness stay where they belong."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1] / "xrpo_jax"
LAYERS = (
    {"types", "arrays"},
    {
        *("rng", "log", "checkpoint", "compile_cache", "profile", "sampling"),
        *("tokenizer", "verify", "machine", "mesh", "prompts"),
    },
    {"data", "model", "chat"},
    {"tasks", "lane"},
    {"lane_programs"},
    {"policy", "sampler"},
    {"explore", "learn"},
    {"algorithms"},
    {"config"},
    {"evaluate", "report", "build", "ahead", "record"},
    {"train"},
    {"main"},
)
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}


def sources() -> dict[str, str]:
    """Source by path below the package, such as `explore/planner.py`."""
    return {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.rglob("*.py")}


def imports(source: str) -> set[str]:
    """Dotted names of all that a file imports, within functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            # `from a.b import c` may name a module c or something in a.b: both are listed.
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def unit_of(dotted: str) -> str | None:
    """`planner` of `xrpo_jax.planner.x`; None for what is outside of the package."""
    parts = dotted.split(".")
    return parts[1] if parts[0] == "xrpo_jax" and len(parts) > 1 else None


def back_arrows(files: dict[str, str]) -> list[str]:
    """Every import of a unit that is not on a lower level than the file's own."""
    found = []
    for path, source in files.items():
        unit = path.split("/")[0].removesuffix(".py")
        for dotted in imports(source):
            other = unit_of(dotted)
            if other not in (None, unit) and LEVEL.get(other, 99) >= LEVEL.get(unit, -1):
                found.append(f"{path} imports xrpo_jax.{other}")
    return sorted(set(found))


def uses(source: str, package: str) -> bool:
    return any(name.split(".")[0] == package for name in imports(source))


def test_every_file_has_a_place():
    units = {path.split("/")[0].removesuffix(".py") for path in sources()} - {"__init__"}
    assert units == set(LEVEL)
    assert not imports(sources()["__init__.py"])


def test_no_arrow_points_back():
    assert back_arrows(sources()) == []


@pytest.mark.parametrize(
    "path, line",
    [
        ("types.py", "from xrpo_jax import rng"),
        ("learn/clip.py", "from xrpo_jax.explore.collect import Explore"),
        ("explore/planner.py", "def f():\n    import xrpo_jax.algorithms.base"),
        ("sampler.py", "from xrpo_jax.policy import Policy"),
        ("model/hf.py", "import xrpo_jax.sampler as s"),
        ("config.py", "from xrpo_jax import report"),
    ],
)
def test_an_arrow_that_points_back_is_found(path, line):
    assert len(back_arrows(sources() | {path: line})) == 1


def test_jax_is_used_where_it_may_be():
    for path, source in sources().items():
        host = ("types.py", "evaluate.py", "report.py", "chat.py", "prompts.py", "tokenizer.py")
        if path.startswith(("tasks/", "data/")) or path in host:
            assert not uses(source, "jax"), path
        if path.startswith("explore/") and path != "explore/collect.py":
            assert not uses(source, "jax"), path


def test_the_learner_draws_no_random_number_on_the_device():
    for path, source in sources().items():
        if not path.startswith("learn/"):
            continue
        assert not any(name.startswith("jax.random") for name in imports(source)), path
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used = f"{node.value.id}.{node.attr}"
                assert used not in ("jax.random", "rng.key", "rng.rows", "rng.tokens"), path


def test_config_dicts_die_at_the_border():
    importers = {path for path, source in sources().items() if uses(source, "ml_collections")}
    assert importers == {"config.py", "main.py"}


def test_nothing_imports_scripts_tests_or_experiments():
    for path, source in sources().items():
        assert not any(uses(source, name) for name in ("scripts", "tests", "experiments")), path
