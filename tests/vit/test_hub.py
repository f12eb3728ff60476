"""Weights by the name of a repository, from a server on loopback that answers as the Hub does."""

import hashlib
import json
import shutil
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from tests.support.commands import start_all
from tests.support.small import small_config
from vit import pretrained
from vit import weights as published
from vit.weights import hub

PUBLISHED = Path(__file__).parents[1] / "support" / "published"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """The calls of `huggingface_hub.snapshot_download` and `model_info`, versions 0.36 to 2.4.

    GET /api/models/NAME[/revision/REVISION]        commit and names of files
    GET /api/models/NAME/tree/COMMIT                names and sizes
    HEAD, GET /NAME/resolve/COMMIT/FILE             the file
    """

    repositories: dict
    """Files by name, by the name of the repository; a text is the code of an error."""
    requests: list

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0].strip("/")
        self.requests.append(path)
        words = path.removeprefix("api/models/").split("/")
        files = self.repositories.get("/".join(words[:2]), "RepoNotFound")
        kind, revision, *names = [*words[2:], "", ""][:2] + words[4:]
        if isinstance(files, str):
            return self.answer(403 if files == "GatedRepo" else 404, error=files)
        if revision not in ("", "main", "v1", COMMIT):
            return self.answer(404, error="RevisionNotFound")
        if kind == "resolve":
            content = files.get("/".join(names))
            return self.answer(404 if content is None else 200, content or b"")
        tree = [{"type": "file", "path": x, "size": len(y), "oid": x} for x, y in files.items()]
        siblings = [{"rfilename": name} for name in files]
        about = {"id": "/".join(words[:2]), "sha": COMMIT, "siblings": siblings}
        self.answer(200, json.dumps(tree if kind == "tree" else about).encode())

    def answer(self, status, content=b"", error=""):
        self.send_response(status)
        headers = {
            "X-Repo-Commit": COMMIT,
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Error-Code": error,
        }
        for name, value in (headers | {"Content-Length": len(content)}).items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


def files(name):
    """The files of a tiny encoder, and others of a repository."""
    names = ("model.safetensors", "config.json", "preprocessor_config.json")
    paths = [PUBLISHED / name / x for x in names]
    own = {path.name: path.read_bytes() for path in paths if path.exists()}
    return own | {"README.md": b"text", "pytorch_model.bin": b"pickle", "onnx/config.json": b"{}"}


REPOSITORIES = {
    "google/vit.tiny": files("hf_vit"),
    "timm/vit_tiny.lvd": files("timm_vit"),
    "old/pickle": {"config.json": b"{}", "pytorch_model.bin": b"pickle", "a.pth": b""},
    "big/parts": {"config.json": b"{}", "model.safetensors.index.json": b"{}"},
    "other/data": {"README.md": b"text"},
    "meta/gated": "GatedRepo",
}


@contextmanager
def serving(handler):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def served(tmp_path, monkeypatch):
    """The requests of a Hub; `huggingface_hub` reads the environment when it is imported."""
    handler = type("Handler", (Hub,), {"repositories": dict(REPOSITORIES), "requests": []})
    with serving(handler) as url:
        environment(monkeypatch, tmp_path, url)
        yield handler
    forget(monkeypatch)


def environment(monkeypatch, folder, url):
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setenv("HF_HOME", str(folder / "cache"))
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    forget(monkeypatch)


def forget(monkeypatch):
    for name in [x for x in sys.modules if x.split(".")[0] == "huggingface_hub"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    ("name", "folder"), [("google/vit.tiny", "hf_vit"), ("timm/vit_tiny.lvd", "timm_vit")]
)
def test_a_name_is_the_files_of_the_repository(served, name, folder):
    """Weights and JSON files, nothing else; a second time, and without a network, the cache."""
    file, origin = hub.download(name)
    assert origin == f"{name}@{COMMIT}"
    want, got = (published.read(x) for x in (PUBLISHED / folder / "model.safetensors", file))
    assert got.model == want.model
    assert got.metadata == want.metadata
    for key, x in want.arrays.items():
        np.testing.assert_array_equal(got.arrays[key], x)
    downloaded = {x.split("/")[-1] for x in served.requests if "/resolve/" in x}
    assert downloaded == {path.name for path in file.parent.iterdir()}
    assert not {"README.md", "pytorch_model.bin"} & downloaded
    served.requests.clear()
    for revision in ("v1", COMMIT):
        assert hub.download(f"{name}@{revision}") == (file, origin)
    assert not any(x.endswith("model.safetensors") for x in served.requests)
    served.repositories.clear()
    assert hub.download(f"{name}@{COMMIT}") == (file, origin)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("google/vit.tinny", "is neither a local path nor a repository of the Hugging Face Hub: c"),
        ("google/vit.tiny@v9", "has no such revision: give a branch, a tag or a commit after the"),
        ("meta/gated", "is restricted: accept its terms on its page of the Hub, and run: hf auth"),
        (
            "big/parts",
            r"has its weights in several parts. Parts are joined .*from_pretrained\('big/parts'\)",
        ),
        (
            "old/pickle",
            r"has no model.safetensors, only pickles \(pytorch_model.bin, a.pth\), .* refused.*\n"
            r"  hf download old/pickle pytorch_model.bin config.json --local-dir=. && python -c",
        ),
        ("other/data", "has no model.safetensors: choose a repository of a ViT that has one"),
        ("google/a--b", "cannot be downloaded from the Hugging Face Hub: HFValidationError: "),
    ],
    ids=lambda x: x if "/" in x[:12] else "",
)
def test_a_name_that_cannot_be_read_is_refused(served, tmp_path, name, message):
    with pytest.raises(ValueError, match=f"^--weights={name} {message}"):
        pretrained.pretrained(Path(name), small_config(), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not any(x.endswith((".bin", ".pth")) for x in served.requests)


def test_nothing_is_asked_of_a_hub_without_need(served, tmp_path, monkeypatch):
    """Not for local paths, files that are missing, or into a folder that is in use."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "google").mkdir()
    shutil.copytree(PUBLISHED / "hf_vit", tmp_path / "google" / "vit.tiny")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("text")
    for name, workdir, message in [
        ("google/vit.tiny", "run", "^google/vit.tiny is a folder: give a file in it"),
        ("dino/model.safetensors", "run", "^dino/model.safetensors does not exist"),
        ("dino/B_16.npz", "run", "^dino/B_16.npz does not exist"),
        ("a/b/c", "run", "^a/b/c does not exist"),
        ("vit", "run", "^vit does not exist"),
        ("timm/vit_tiny.lvd", "used", "used is not empty; choose another --workdir"),
    ]:
        with pytest.raises(ValueError, match=message):
            pretrained.pretrained(Path(name), small_config(), tmp_path / workdir)
    assert served.requests == []


def test_without_a_network_the_cache_serves(served, tmp_path, monkeypatch):
    """Also by a name without a commit; a cache without weights is not the repository's fault."""
    import huggingface_hub

    got = hub.download("google/vit.tiny")
    huggingface_hub.hf_hub_download("timm/vit_tiny.lvd", "config.json")
    environment(monkeypatch, tmp_path, "http://127.0.0.1:9")
    assert hub.download("google/vit.tiny") == got
    with pytest.raises(ValueError, match="has no model.safetensors in the cache of huggingface"):
        hub.download("timm/vit_tiny.lvd")


def test_without_a_network_or_the_package(tmp_path, monkeypatch):
    environment(monkeypatch, tmp_path, "http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"--weights=a/b is neither a local path nor in the cache"):
        hub.download("a/b")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"requires huggingface_hub: pip install huggingface_hub"):
        hub.download("a/b")


@pytest.mark.thorough
def test_the_command_makes_a_run_that_names_the_commit(served, tmp_path):
    runs = [("google/vit.tiny", "run"), ("google/none", "other")]
    lines = [["vit.pretrained", f"--weights={name}", f"--workdir={run}"] for name, run in runs]
    (code, out, err), refused = start_all(lines, ("vit.pretrained",), tmp_path)
    assert code == 0, err
    assert f"downloaded: google/vit.tiny@{COMMIT}\n" in out
    origin = json.loads((tmp_path / "run" / "origin.json").read_text())
    assert origin == {"weights": f"google/vit.tiny@{COMMIT}"}
    assert (refused[0], refused[1], refused[2].count("\n")) == (1, "", 1)
    assert refused[2].startswith("ValueError: --weights=google/none is neither a local path nor a ")
