"""scripts/bench.py and bench_peers.py: their work, command lines, tables, and a small run."""

import dataclasses
import functools
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from xrpo_jax import config, tokenizer

ROOT = pathlib.Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"


@pytest.fixture
def script(monkeypatch):
    """A function that imports one of the scripts, which find their neighbours."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


def letters(text):
    """A tokenizer of one token a character."""
    return list(text.encode())


# --- the work ---------------------------------------------------------------------------------


def test_all_rows_are_full_unless_lengths_vary(script):
    work = script("bench_work")
    assert work.limits("rollout", 4, 64) == (64, 64, 64, 64)
    varied = work.limits("variable", 64, 64)
    assert (len(varied), min(varied), max(varied)) == (64, 8, 256)
    assert varied == work.limits("variable", 64, 64)
    # Skewed as the README says, and no group of eight has all the long ones.
    assert np.median(varied) < 40 and np.quantile(varied, 0.9) > 185
    assert max(sum(varied[i : i + 8]) for i in range(0, 64, 8)) < sum(varied) / 3


def test_prompts_have_the_lengths_asked_for_and_differ(script):
    work = script("bench_work")
    texts = work.texts(letters, 8, 32, 41)
    lengths = [len(letters(text)) for text in texts]
    assert min(lengths) >= 32 and max(lengths) == 41 and len(set(texts)) == 8
    with pytest.raises(ValueError, match="prompts of 1 to 3 tokens"):
        work.texts(letters, 2, 1, 3)


@pytest.mark.parametrize("length", range(31, 43))
def test_prompts_of_every_length_can_be_made(script, length):
    """Where a space is a token of its own, too, as the embedded tokenizer has it."""
    words = tokenizer.load(config.EMBEDDED)
    for text in script("bench_work").texts(words.encode, 3, length, length):
        assert len(words.encode(text)) == length


def test_every_point_of_the_cost_curve_is_work_with_settings(script, tmp_path, monkeypatch):
    curve, models, ours = script("bench_curve"), script("bench_models"), script("bench_ours")
    small = dataclasses.replace(models.tiny(), num_layers=1, hidden_size=8, intermediate_size=8)
    monkeypatch.setattr(models, "tiny", functools.partial(dataclasses.replace, small))
    for name, point in curve.POINTS.items():
        work = curve.work_of(name, tmp_path)
        assert (work.rows, len(set(work.texts))) == (point["rows"], point["rows"] // 8)
        assert max(map(len, work.prompts)) == point["prompt"]
        assert set(work.limits) == {point["completion"]}
        settings = ours.settings_of(work, {})
        assert settings.rollout.prompts == len(work.prompts)


def test_prompts_of_every_length_for_smollm2(script):
    models, work = script("bench_models"), script("bench_work")
    if not (ROOT / models.SMOLLM2 / "tokenizer.json").is_file():
        pytest.skip(f"{models.SMOLLM2} is not there")
    words = tokenizer.load(ROOT / models.SMOLLM2)
    for length in (32, 33, 40, 41, 128, 2048):
        for text in work.texts(words.encode, 2, length, length):
            assert len(words.encode(text)) == length


def test_rewards_vary_and_hang_on_the_text_alone(script):
    work = script("bench_work")
    right = [work.right(f"completion {i}") for i in range(400)]
    assert right == [work.right(f"completion {i}") for i in range(400)]
    assert 150 < sum(right) < 250


def some_work(script, kind, **changes):
    work = script("bench_work")
    return dataclasses.replace(
        work.Work(
            kind=kind,
            model="nowhere",
            dtype="float32",
            texts=("a", "b"),
            prompts=((1, 2, 3), (4, 5)),
            samples=2,
            limits=(4, 4, 4, 4),
        ),
        **changes,
    )


def test_work_travels_as_json(script):
    work = some_work(script, "rollout")
    raw = json.loads(json.dumps(dataclasses.asdict(work) | {"options": {}}))
    assert script("bench_work").Work.read(raw) == work
    assert (work.rows, work.useful) == (4, 16)


def test_floor_counts_each_product_once(script):
    floor, tiny = script("bench_floor"), script("bench_models").tiny()
    weights = sum(k * n * count for k, n, count in floor.shapes(tiny).values())
    from xrpo_jax.model import params

    # Every weight but the norms' is in one product; the head is the embedding.
    norms = 128 * (2 * 4 + 1)
    assert weights == params.count(params.declare(tiny)) - norms
    head = 2 * 128 * 416
    body = 2 * weights - head
    # 5 prompt tokens, and 3 of each row's 4: what is drawn last is fed to nothing.
    sampling = body * (5 + 12) + head * (2 + 12)
    training = 3 * (body * (5 + 12) + head * 16)
    for kind, expected in (
        ("rollout", sampling),
        ("variable", sampling),
        ("update", training),
        ("step", sampling + training),
    ):
        assert sum(floor.products(tiny, some_work(script, kind)).values()) == expected


# --- command lines ----------------------------------------------------------------------------


def test_cases_are_chosen_by_pattern(script):
    bench = script("bench")
    assert len(bench.arguments([]).names) == 16
    assert bench.arguments(["--only=step:*:bfloat16"]).names == [
        "step:smollm2:bfloat16",
        "step:tiny:bfloat16",
    ]
    small = bench.arguments(["--small"])
    assert {name.split(":")[1] for name in small.names} == {"tiny"} and small.repeats == 1
    curve = bench.arguments(["--cost-curve", "--only=rows:*:rollout"])
    assert curve.names == [f"rows:{rows}:rollout" for rows in (16, 64, 256, 1024)]
    assert (curve.repeats, bench.arguments(["--repeats=5"]).repeats) == (3, 5)
    sized = bench.arguments(["--small", "--samples=4"])
    assert (sized.prompts, sized.samples, sized.new_tokens) == (2, 4, 4)


@pytest.mark.parametrize(
    ("name", "argv", "said"),
    [
        ("bench", ["--only=nothing"], "allowed: some of rollout:smollm2:float32"),
        ("bench", ["--repeats=0"], "--repeats=0; allowed: at least 1"),
        ("bench_peers", ["--only=step:*"], "allowed: some of transformers:rollout"),
        ("bench", ["--small", "--cost-curve"], "--cost-curve --small; allowed: one of them"),
        ("bench", ["--cost-curve", "--new-tokens=4"], "--new-tokens=4; allowed: without --cost-c"),
        ("bench", ["--set=foo"], "--set=foo; allowed: section.key=value"),
        ("bench", ["--set=rollout.slot=1"], "--set: rollout.slot is no setting"),
        ("bench_peers", ["--rounds=0"], "--rounds=0; allowed: at least 1"),
        ("bench_peers", ["--set=foo"], "--set=foo; allowed: section.key=value"),
        ("bench_peers", ["--peer-set=foo"], "--peer-set=foo; allowed: key=value"),
        (
            "bench_peers",
            ["--only=trl*", "--peer-set=cach=static"],
            "--peer-set=cach=static; allowed for trl: weights, micro_batch, cache, checkpointing",
        ),
        (
            "bench_peers",
            ["--only=t*:rollout:*", "--peer-set=cache=static"],
            "allowed for tunix-rollout: nothing",
        ),
    ],
)
def test_a_wrong_command_line_says_what_is_allowed(script, capsys, name, argv, said):
    with pytest.raises(SystemExit) as error:
        script(name).arguments(argv)
    assert error.value.code == 2 and said in capsys.readouterr().err


def test_settings_are_named_and_checked(script):
    ours = script("bench_ours")
    settings = ["--set=rollout.slots=16", "--set=model.dtype=bfloat16"]
    for name in ("bench", "bench_peers"):
        assert script(name).arguments(settings).chosen == {
            "rollout.slots": 16,
            "model.dtype": "bfloat16",
        }
    given = script("bench_peers").arguments(["--only=trl:*", "--peer-set=micro_batch=8"])
    assert given.options == {"micro_batch": "8"}
    with pytest.raises(ValueError, match="rollout.slot is no setting"):
        ours.settings_of(some_work(script, "rollout"), {"rollout.slot": 1})


def test_every_comparison_names_a_peer_that_is_there(script):
    peers, work = script("bench_peers"), script("bench_work")
    environments = script("bench_environments")
    for name in peers.COMPARISONS:
        peer, kind, model, dtype = name.split(":")
        assert (SCRIPTS / "peers" / f"{peers.PEERS[peer].script}.py").is_file()
        assert peers.PEERS[peer].environment in environments.PACKAGES
        assert kind in work.KINDS and kind in peers.GOALS and model in ("smollm2", "tiny")


def test_peers_name_the_options_that_their_scripts_read(script):
    for peer in script("bench_peers").PEERS.values():
        text = (SCRIPTS / "peers" / f"{peer.script}.py").read_text()
        assert set(peer.names) == set(re.findall(r'options\.get\("(\w+)"', text))
        assert {name for name, _ in peer.options} <= set(peer.names)


def test_an_environment_is_taken_only_with_the_pinned_versions(script, tmp_path, monkeypatch):
    environments = script("bench_environments")
    held = {"google-tunix": "0.1.7", "jax": "0.10.2", "safetensors": "0.7.0"}
    monkeypatch.setattr(environments, "versions", lambda name, envs: held)
    (tmp_path / "tunix").mkdir()
    environments.make("tunix", tmp_path)
    for wrong in ({"jax": "0.10.1"}, {"google-tunix": ""}):
        monkeypatch.setattr(environments, "versions", lambda name, envs, w=wrong: held | w)
        with pytest.raises(RuntimeError, match="has not the versions google-tunix==0.1.7"):
            environments.make("tunix", tmp_path)
    held = {"torch": "2.13.0+cpu", "transformers": "5.24.0", "trl": "1.16.0", "safetensors": "1"}
    monkeypatch.setattr(environments, "versions", lambda name, envs: held)
    (tmp_path / "trl").mkdir()
    environments.make("trl", tmp_path)


# --- tables -----------------------------------------------------------------------------------


def run(seconds, peak, others=0.0, tokens=100):
    return {
        "tokens": tokens,
        "seconds": seconds,
        "peak_gb": peak,
        "others": others,
        "stolen": 0.01,
        "compiles": 0,
        "compile_seconds": 0.0,
    }


def test_ratios_are_of_neighbours_in_time(script):
    peers = script("bench_peers")
    # The machine slows down fourfold: ratios within a round stay 2, 2 and 4.
    found = {
        "ours": [run(1.0, 3.0), run(2.0, 4.0), run(4.0, 4.0, others=0.07)],
        "peer": [run(2.0, 7.0), run(4.0, 8.0), run(16.0, 8.0)],
    }
    facts = peers.summary(found)
    assert facts["ratio"] == {"median": 2.0, "low": 2.0, "high": 4.0}
    assert facts["memory"] == 0.5
    text = peers.table({"trl:step:tiny:float32": {"summary": facts}})
    assert text.splitlines()[-1] == (
        "| step, tiny, float32 | trl | 50 (25 to 100) | 25 (6 to 50) | **2.00** (2.00 to 4.00) "
        "| 3 | 4.0 / 8.0 = 0.50 | 7 %, 1 % |"
    )


def test_table_of_cases(script):
    bench = script("bench")
    found = {
        "first": run(9.0, 1.0) | {"compile_seconds": 7.25},
        "runs": [run(2.0, 1.5), run(1.0, 1.5, others=0.2), run(4.0, 1.75) | {"compiles": 2}],
        "floor": {"seconds": 0.5, "own_seconds": 1.0},
    }
    good = {"summary": bench.summary(found)}
    lines = bench.table({"step:tiny:float32": good, "step:smollm2:float32": {"failure": "gone"}})
    assert lines.splitlines()[-2:] == [
        "| step, tiny, float32 | 50 (25 to 100) | 2 | 25 %, 50 % "
        "| 7.2 (+2 later) | 1.75 | 20 %, 1 % |",
        "| step, smollm2, float32 | failed: gone | | | | | |",
    ]


def test_phases_are_shares_of_the_whole(script):
    timed = [run(2.0, 1.0) | {"phases": {"sample": 1.0, "update": 0.5}}, run(4.0, 1.0)]
    found = {"step:tiny:float32": {"runs": timed}, "rollout:tiny:float32": {"runs": timed[1:]}}
    found["update:tiny:float32"] = {"failure": "gone"}
    said = "step, tiny, float32: sample 50.0 %, update 25.0 %"
    assert script("bench").phases(found) == said


def test_results_of_other_cases_stay_in_the_file(script, tmp_path):
    bench = script("bench")
    bench.write(tmp_path / "new" / "all.json", {"a": 1, "b": 1})
    bench.write(tmp_path / "new" / "all.json", {"b": 2})
    assert json.loads((tmp_path / "new" / "all.json").read_text()) == {"a": 1, "b": 2}


def fails_once(result):
    """A function that raises on its first call, then returns `result`."""
    calls = []

    def measured(*_):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("ours ended with -9")
        return result

    return measured


def measured_case():
    floor = {"seconds": 0.5, "own_seconds": 1.0}
    return {"work": {"kind": "rollout", "dtype": "float32", "samples": 8}} | {
        "first": run(9.0, 1.0),
        "runs": [run(2.0, 1.5)],
        "floor": floor,
    }


@pytest.mark.parametrize("curve", [False, True])
def test_a_case_that_fails_is_told_and_the_others_run(script, tmp_path, monkeypatch, capsys, curve):
    bench = script("bench")
    case = measured_case()
    case["summary"] = bench.summary(case)
    monkeypatch.setattr(bench, "measure", fails_once(case))
    monkeypatch.setattr(script("bench_curve"), "work_of", lambda *_: None)
    argv = ["--cost-curve", "--only=rows:16:*"] if curve else ["--only=[ru][op]*:tiny:float32"]
    names = bench.arguments(argv).names
    assert len(names) == 2
    file = tmp_path / "all.json"
    assert bench.main([*argv, f"--out={tmp_path}", f"--json={file}"]) == 1
    found = json.loads(file.read_text())
    assert found[names[0]]["failure"] == "RuntimeError: ours ended with -9"
    assert found[names[1]]["summary"]["rate"] == 50
    said = capsys.readouterr().out
    assert said.count("| failed: RuntimeError: ours ended with -9 |") == 2
    assert bench.main([*argv, f"--out={tmp_path}", f"--json={file}"]) == 0
    assert "failure" not in json.loads(file.read_text())[names[0]]


def test_a_comparison_that_fails_is_in_the_file(script, tmp_path, monkeypatch):
    peers, file = script("bench_peers"), tmp_path / "all.json"
    file.write_text(json.dumps({"other": 1}))
    found = {"ours": [run(1.0, 3.0)], "peer": [run(2.0, 7.0)]}
    monkeypatch.setattr(peers, "compare", fails_once(found | {"summary": peers.summary(found)}))
    for only, code in (("tunix:step:tiny:*", 1), ("trl:step:tiny:*", 0)):
        assert peers.main([f"--only={only}", f"--json={file}"]) == code
    written = json.loads(file.read_text())
    assert written["other"] == 1
    assert written["tunix:step:tiny:float32"] == {"failure": "RuntimeError: ours ended with -9"}
    assert written["trl:step:tiny:float32"]["summary"]["ratio"]["median"] == 2


def test_curve_is_drawn_from_what_is_there(script, tmp_path):
    curve = script("bench_curve")
    facts = {"rate": 10.0, "low": 9.0, "high": 12.0, "peak_gb": 0.5}
    assert all(point in curve.POINTS for point in ("rows:1024:update", "vocabulary:49152:rollout"))
    picture = curve.draw({"rows:16:rollout": facts, "rows:64:rollout": facts}, tmp_path / "c.png")
    assert picture.stat().st_size > 10_000


# --- machine and pipe -------------------------------------------------------------------------


def test_watch_sees_own_work_and_memory(script):
    machine = script("bench_machine")
    with machine.watch() as spell:
        total = sum(i * i for i in range(2_000_000))
    assert total and spell.seconds > 0
    for share in (spell.own, spell.others, spell.stolen):
        assert 0 <= share <= 1
    held = np.ones(30_000_000)
    assert machine.peak_gb() > held.nbytes / 1e9
    assert {"processor", "cores", "load"} == set(machine.describe())


ENGINE = """
import sys
from bench_pipe import serve
def prepare(raw):
    print("a library prints")
    runs = []
    def run():
        runs.append(1)
        if len(runs) == raw["dies_at"]:
            raise RuntimeError("out of luck")
        return {"tokens": len(runs)}
    return {"run": run}
serve(prepare)
"""


@pytest.fixture
def engine(script, monkeypatch, tmp_path):
    pipe = script("bench_pipe")
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers" / "fake.py").write_text(ENGINE)
    for name in ("bench_pipe", "bench_machine"):
        (tmp_path / f"{name}.py").write_text((SCRIPTS / f"{name}.py").read_text())
    monkeypatch.setattr(pipe, "SCRIPTS", tmp_path)
    return lambda work: pipe.Engine(pathlib.Path(sys.executable), "fake", work, tmp_path / "log")


def test_engines_run_when_told(engine):
    with engine({"dies_at": 0}) as one, engine({"dies_at": 0}) as other:
        assert [each.run()["tokens"] for each in (one, other, one)] == [1, 1, 2]
        assert one.warm()["tokens"] == 3  # has no other way to warm up than to run
        assert {"seconds", "own", "others", "stolen", "peak_gb"} <= set(one.run())


def test_an_engine_that_dies_is_named_with_its_last_words(engine):
    with engine({"dies_at": 2}) as one:
        one.run()
        with pytest.raises(RuntimeError, match="fake ended with 1: RuntimeError: out of luck"):
            one.run()


def test_rounds_alternate_and_the_first_is_kept_apart(script):
    peers = script("bench_peers")
    order = []

    class Fake:
        loaded = {}

        def __init__(self, name):
            self.name = name

        def warm(self):
            order.append(f"warm {self.name}")

        def run(self):
            order.append(self.name)
            return run(1.0, 1.0)

    found = peers.measure(Fake("ours"), Fake("peer"), 2, "")
    assert order == ["warm ours", "warm peer", *["ours", "peer"] * 2]
    assert len(found["ours"]) == len(found["peer"]) == 2


def test_a_wrapper_holds_the_machine_while_engines_run(script):
    peers = script("bench_peers")
    with peers.alone("env"):
        pass
    with pytest.raises(RuntimeError, match="does not run `cat`"), peers.alone("echo"):
        pass


def test_a_wrapper_that_ends_before_it_is_asked_is_named(script, monkeypatch):
    peers, start = script("bench_peers"), subprocess.Popen

    def ended(*arguments, **settings):
        process = start(*arguments, **settings)
        process.wait(10)
        return process

    monkeypatch.setattr(peers.subprocess, "Popen", ended)
    with pytest.raises(RuntimeError, match="--wrapper=true does not run `cat`"):
        with peers.alone("true"):
            pass


# --- the engine itself ------------------------------------------------------------------------


@pytest.fixture
def model(script, tmp_path):
    """The directory of the model that --small takes."""
    return script("bench_models").model_folder("tiny", tmp_path, **script("bench").SMALL_MODEL)


CHOSEN = {"rollout.slots": 8, "train.micro_batch": 8, "train.share": 4, "mesh.devices": 1}


@pytest.mark.parametrize("kind", ["update", "step", "rollout", "variable"])
def test_every_kind_runs_and_compiles_on_its_first_run_only(script, model, kind):
    ours = script("bench_ours")
    make_work = script("bench_models").make_work
    # So many that caches grow in a rollout.
    new_tokens = 64 if kind == "rollout" else 3
    work = make_work(kind, model, "float32", prompts=2, samples=4, new_tokens=new_tokens)
    assert all(32 <= len(prompt) <= 41 for prompt in work.prompts)
    bench = ours.Bench(work, CHOSEN)
    if kind in ("rollout", "variable"):
        assert len(bench.parts.draw.sampler.cache_lengths) > 1
    first, second = bench.warm(), bench.run()
    assert first["tokens"] == (8 if kind in ("rollout", "variable") else work.useful)
    assert second["tokens"] == work.useful
    assert first["compiles"] > 0 and first["compile_seconds"] > 0
    assert second["compiles"] == 0


def test_rows_get_the_tokens_they_are_to_get(script, model):
    ours = script("bench_ours")
    make_work = script("bench_models").make_work
    work = make_work("rollout", model, "float32", prompts=1, samples=4, new_tokens=3)
    work = dataclasses.replace(work, limits=(1, 3, 2, 3))
    bench = ours.Bench(work, CHOSEN)
    assert [bench.warm()["tokens"], bench.run()["tokens"]] == [4, 9]


def test_small_run_prints_a_table(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            str(SCRIPTS / "bench.py"),
            "--small",
            "--only=rollout:*",
            f"--out={tmp_path}",
            f"--json={tmp_path / 'all.json'}",
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "| rollout, tiny, float32 |" in done.stdout
    facts = json.loads((tmp_path / "all.json").read_text())["rollout:tiny:float32"]
    assert facts["runs"][0]["tokens"] == 16 and facts["floor"]["best_gflops_per_second"] > 0
