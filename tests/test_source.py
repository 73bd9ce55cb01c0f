"""Where a model comes from: the three forms, and an error that names each way it can fail."""

import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors
from tiny import policy as tiny

from xrpo_jax.model import hf
from xrpo_jax.model.source import Source, find

ROOT = Path(__file__).parents[1]


@pytest.fixture
def downloads(monkeypatch):
    """What the Hub is asked for; `answer` is what it says, an error or a folder."""
    asked = []

    def snapshot_download(name, **settings):
        asked.append((name, settings))
        if isinstance(snapshot_download.answer, Exception):
            raise snapshot_download.answer
        return str(snapshot_download.answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    snapshot_download.asked = asked
    return snapshot_download


def error(kind: type, text: str) -> Exception:
    """An error of the Hub as it is after its message was made from a response."""
    made = kind.__new__(kind)
    Exception.__init__(made, text)
    return made


def test_a_directory_is_itself(tmp_path, monkeypatch):
    tiny.save(tmp_path / "org" / "name")
    assert find(str(tmp_path / "org/name")) == Source(folder=tmp_path / "org/name", gguf=None)
    monkeypatch.chdir(tmp_path)  # a directory comes before an id of the Hub
    assert find("org/name") == Source(folder=Path("org/name"), gguf=None)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hf.load(find("~/org/name"))[0] == tiny.MODEL


def test_an_id_is_downloaded_with_the_files_that_are_needed(downloads, tmp_path):
    downloads.answer = tiny.save(tmp_path / "model")
    assert find("org/na-me.2") == Source(folder=tmp_path / "model", commit="model")
    assert find("org/name@refs/pr/1").folder == tmp_path / "model"
    (name, first), (other, second) = downloads.asked
    assert (name, first["revision"]) == ("org/na-me.2", None)
    assert (other, second["revision"]) == ("org/name", "refs/pr/1")
    wanted = first["allow_patterns"]
    for file in ("config.json", "model-*.safetensors", "tokenizer.json", "chat_template.jinja"):
        assert file in wanted
    assert not any("bin" in pattern or pattern == "*" for pattern in wanted)


FAILURES = {
    "gated": (error(errors.GatedRepoError, "403"), "GatedRepoError: 403.: accept .* set HF_TOKEN"),
    "unknown": (error(errors.RepositoryNotFoundError, "404"), "check the spelling, .*HF_TOKEN"),
    "revision": (error(errors.RevisionNotFoundError, "no such"), "no such.: check the spelling"),
    "offline": (
        errors.LocalEntryNotFoundError("cannot find it\nand so on"),
        "find it.: is there a",
    ),
    "network": (OSError("name not known"), "OSError: name not known.: is there a network"),
}


@pytest.mark.parametrize("name", sorted(FAILURES))
def test_what_was_not_downloaded_is_named_with_the_cure(name, downloads):
    downloads.answer, message = FAILURES[name]
    with pytest.raises(
        ValueError, match=rf"init_from='org/name' is no directory.*{message}"
    ) as got:
        find("org/name")
    assert "or download it elsewhere and give its directory" in str(got.value)
    assert "\n" not in str(got.value)


@pytest.mark.parametrize(
    "value", ["", "name", "/no/where", "./a/b", "a/b/c", "a/b@", "https://x/y"]
)
def test_anything_else_is_refused_with_what_is_allowed(value, downloads):
    with pytest.raises(ValueError, match=r"init_from='.*'; allowed: a Hugging Face directory, a G"):
        find(value)
    assert not downloads.asked


def test_a_file_is_no_source(tmp_path, downloads, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "model.safetensors").touch()
    with pytest.raises(ValueError, match="allowed: a Hugging Face directory"):
        find("org/model.safetensors")
    with pytest.raises(FileNotFoundError, match="init_from='org/gone.gguf' does not exist; allow"):
        find("org/gone.gguf")
    (tmp_path / "notes.gguf").write_text("not a GGUF file")
    with pytest.raises(ValueError, match="notes.gguf is damaged .it begins with b'not '"):
        find("notes.gguf")


def test_the_folder_of_a_gguf_file_lives_as_long_as_the_process(tmp_path):
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    from test_gguf import make, torch_layout, write

    config, weights = make("qwen3")
    path = write(tmp_path / "a.gguf", config, torch_layout(config, weights), general="x")
    code = (
        "from xrpo_jax.model.source import find\n"
        f"folder = find({str(path)!r}).folder\n"
        "print(folder, *sorted(path.name for path in folder.iterdir()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    folder, *names = done.stdout.split()
    wanted = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert names == wanted and not Path(folder).exists()


def test_the_licence_of_a_gguf_file_is_told(tmp_path):
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    from test_gguf import make, torch_layout, write

    config, weights = make("qwen2")
    path = tmp_path / "a.gguf"
    tensors = torch_layout(config, weights)
    write(path, config, tensors, **{"general.license": "mit", "general.name": "Small"})
    folder = find(str(path)).folder
    text = "The weights of Small are licensed as mit, as a.gguf states.\n"
    assert (folder / "LICENSE").read_text() == text
    raw = json.loads((folder / "config.json").read_text())
    assert raw["model_type"] == "qwen2" and raw["rms_norm_eps"] == 1e-5
