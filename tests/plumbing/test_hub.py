"""Hub ids: what is fetched, what is read offline, and what a hub that is not there gives."""

import shutil
from pathlib import Path
from unittest import mock

import huggingface_hub
from commands import Done, is_refused, process
from common import ROOT
from huggingface_hub.utils import filter_repo_objects

from plumbing.files import locate

COMMIT = "c0ffee" + "0" * 34
NOWHERE = "http://127.0.0.1:9"


def decode(cache: Path, **environment: str) -> Done:
    environment = {"HF_HUB_CACHE": str(cache), "HF_ENDPOINT": NOWHERE} | environment
    words = ("--model", "org/name", "--prompt", "Tom owns 4 boxes.", "--max-new", 3)
    return process("decode.py", *words, "--device", "cpu", **environment)


def test_only_what_is_needed_is_fetched(monkeypatch):
    """No formats that are not read, and nothing in folders. (HF_TOKEN is left to the client.)"""
    spy = mock.Mock(return_value="fetched")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", spy)
    assert locate("org/name") == Path("fetched") and spy.call_args.args == ("org/name",)
    needed = ["config.json", "tokenizer.json", "model.safetensors.index.json"]
    needed += ["model-00001-of-00001.safetensors", "chat_template.jinja"]
    useless = ["README.md", "onnx/model.safetensors", "original/params.json", "a.bin"]
    assert list(filter_repo_objects(needed + useless, **spy.call_args.kwargs)) == needed


def test_what_was_fetched_is_read_offline(tmp_path):
    """From a cache in the layout that huggingface_hub documents."""
    repository = tmp_path / "models--org--name"
    shutil.copytree(ROOT / "toy/mars", repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT)
    done = decode(tmp_path, HF_HUB_OFFLINE="1")
    assert done.status == 0 and done.out.strip(), done.err


def test_what_the_hub_refuses(tmp_path):
    done = decode(tmp_path, HF_HUB_OFFLINE="0")
    assert is_refused(done, "org/name: no such directory in ")
    assert "check your internet connection" in done.err
