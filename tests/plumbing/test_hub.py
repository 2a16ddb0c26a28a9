"""Hub ids: the real huggingface_hub client, and a local server that answers as the hub."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from common import ROOT
from safetensors import safe_open

COMMIT = "c0ffee" + "0" * 34
TOKEN = "hf_readsit"
USELESS = ("README.md", "onnx/model.safetensors", "original/params.json", "a.bin")


class Hub(BaseHTTPRequestHandler):
    """Serves `directory` as org/name to who has the token, and nothing else."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        is_allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if "/org/name/" in path and is_allowed:
            self.serve(path)
        else:
            self.answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def serve(self, path: str) -> None:
        directory = self.server.directory
        files = [file for file in directory.rglob("*") if file.is_file()]
        names = [str(file.relative_to(directory)) for file in files]
        if path.startswith("/api/models/org/name/revision/"):
            siblings = [{"rfilename": name} for name in names]
            content = {"id": "org/name", "sha": COMMIT, "siblings": siblings}
            self.answer(200, json.dumps(content).encode())
        elif path.startswith("/api/models/org/name/tree/"):
            entries = []
            for name, file in zip(names, files):
                size = file.stat().st_size
                entries.append({"type": "file", "oid": "0" * 40, "path": name, "size": size})
            self.answer(200, json.dumps(entries).encode())
        else:
            content = (directory / path.partition(f"/resolve/{COMMIT}/")[2]).read_bytes()
            tag = f'"{hashlib.sha1(content).hexdigest()}"'
            self.answer(200, content, {"ETag": tag, "X-Repo-Commit": COMMIT})

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def hub(directory):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.directory = directory
    server.asked = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def decode(cache, endpoint, model="org/name", **environment) -> subprocess.CompletedProcess:
    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE")
    inherited = {k: v for k, v in os.environ.items() if k not in names}
    inherited |= {"HF_HOME": str(cache), "HF_ENDPOINT": endpoint, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "decode.py", "--model", model, "--prompt", "Tom owns 4 boxes."]
    return subprocess.run(
        [*command, "--max-new", "3", "--device", "cpu"],
        cwd=ROOT,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def published(tmp_path):
    """A model as on the hub: shards, an index, and files that decoding does not need."""
    directory = tmp_path / "published"
    shutil.copytree(ROOT / "toy/mars", directory)
    weights = directory / "model.safetensors"
    weights.rename(directory / "model-00001-of-00001.safetensors")
    with safe_open(directory / "model-00001-of-00001.safetensors", "pt") as file:
        places = dict.fromkeys(file.keys(), "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in USELESS:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("not for us")
    return directory


def one_line(done: subprocess.CompletedProcess, message: str) -> None:
    """It failed, and the message is the last line of standard error."""
    error = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and message in error, done.stderr
    assert "Traceback" not in done.stderr and not done.stdout


def test_a_private_model_is_fetched_once_and_then_read_offline(published, tmp_path):
    cache = tmp_path / "cache"
    with hub(published) as server:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        online = decode(cache, endpoint, HF_TOKEN=TOKEN)
        assert online.returncode == 0, online.stderr
        fetched = {path.partition("/resolve/")[2][41:] for path in server.asked} - {""}
        files = {str(path.relative_to(published)) for path in published.rglob("*.*")}
        assert fetched == files - set(USELESS)
        server.asked.clear()
        offline = decode(cache, endpoint, HF_HUB_OFFLINE="1")
        assert not server.asked
    assert offline.returncode == 0, offline.stderr
    assert online.stdout == offline.stdout and online.stdout.strip()


def test_what_the_hub_refuses(published, tmp_path):
    with hub(published) as server:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        done = decode(tmp_path / "a", endpoint, HF_TOKEN="hf_wrong")
        one_line(done, "org/name: no such directory in ")
        one_line(done, "make sure you are authenticated")
        one_line(decode(tmp_path / "a", endpoint, "no/such-model"), "Repository Not Found")
    one_line(decode(tmp_path / "a", endpoint), "check your internet connection")
    done = decode(tmp_path / "a", endpoint, "no/such-model", HF_HUB_OFFLINE="1")
    one_line(done, "outgoing traffic has been disabled")
