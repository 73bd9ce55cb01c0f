"""Where a model comes from: a Hugging Face directory, a GGUF file, or an id of the Hub."""

import atexit
import dataclasses
import json
import re
import shutil
import tempfile
from pathlib import Path

from xrpo_jax.model import files, gguf, gguf_tokenizer

_HUB_ID = re.compile(r"(?P<id>[\w-][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_ALLOWED = (
    "a Hugging Face directory, a GGUF file (*.gguf), or a Hub id such as org/name or "
    "org/name@revision"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A model's config and tokenizer files in `folder`; its weights there, or in a GGUF file."""

    folder: Path
    gguf: Path | None = None
    commit: str = ""  # of a model of the Hub


def find(init_from: str) -> Source:
    """Returns where the model lies that `init_from` names, downloading it if it is a Hub id.

    The config and tokenizer of a GGUF file are written to a folder that lives as long as this
    process. Raises FileNotFoundError or ValueError naming `init_from`, its value and the cure.
    """
    path = Path(init_from).expanduser()
    if init_from and path.is_dir():
        return Source(folder=path, gguf=None)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"init_from={init_from!r} does not exist; allowed: {_ALLOWED}")
        return _unpacked(path)
    match = _HUB_ID.fullmatch(init_from)
    if not match or path.exists():
        raise ValueError(f"init_from={init_from!r}; allowed: {_ALLOWED}")
    folder = _downloaded(init_from, match["id"], match["revision"])
    return Source(folder=folder, commit=folder.name)  # a snapshot's folder is named by its commit


def _unpacked(file: Path) -> Source:
    """Writes what a model directory has besides weights, so that all else works as for one."""
    header = gguf.read(file)
    raw = gguf.config(header)
    folder = Path(tempfile.mkdtemp(prefix="xrpo_jax_gguf."))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / files.CONFIG).write_text(json.dumps(raw, indent=2) + "\n")
    gguf_tokenizer.write(file, header.fields, folder)
    ends = [header.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    generation = {
        "bos_token_id": raw["bos_token_id"],
        "eos_token_id": sorted({end for end in ends if end is not None}),
        "pad_token_id": raw["pad_token_id"],
    }
    generation = {key: value for key, value in generation.items() if value not in (None, [])}
    (folder / files.GENERATION).write_text(json.dumps(generation, indent=2) + "\n")
    if licence := header.fields.get("general.license"):
        model = header.fields.get("general.name", file.stem)
        text = f"The weights of {model} are licensed as {licence}, as {file.name} states.\n"
        (folder / files.LICENSES[0]).write_text(text)
    return Source(folder=folder, gguf=file)


def _downloaded(init_from: str, name: str, revision: str | None) -> Path:
    import huggingface_hub  # imported here: it takes a second, and a local model needs none of it
    from huggingface_hub import errors

    wanted = (files.CONFIG, files.GENERATION, files.WEIGHTS, files.INDEX, "model-*.safetensors")
    try:
        folder = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=[*wanted, *files.TOKENIZER_FILES, *files.LICENSES],
        )
    except errors.GatedRepoError as error:
        cure = "accept its terms on huggingface.co and set HF_TOKEN"
        raise ValueError(_not_downloaded(init_from, error, cure)) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        cure = "check the spelling, and set HF_TOKEN when it is private"
        raise ValueError(_not_downloaded(init_from, error, cure)) from error
    # Without a network the reasons are many, by version and by proxy; the cure is one.
    except Exception as error:
        cure = "is there a network?"
        raise ValueError(_not_downloaded(init_from, error, cure)) from error
    return Path(folder)


def _not_downloaded(init_from: str, error: Exception, cure: str) -> str:
    reason = (str(error).strip().splitlines() or [""])[0]
    return (
        f"init_from={init_from!r} is no directory here and was not downloaded "
        f"({type(error).__name__}: {reason}): {cure}; or download it elsewhere and give its "
        "directory"
    )
