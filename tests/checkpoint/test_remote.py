"""`gs://` folders, against a small object store on the loopback interface."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from k3jax.checkpoint.folder import File, Folder

CHECK = """
import sys, numpy as np
from k3jax.checkpoint.__main__ import main
from k3jax.checkpoint.load import load
from k3jax.checkpoint.orbax_io import named_leaves
local, remote, orbax = sys.argv[1:]
assert main(["import", remote, orbax, "--host", "1/2"]) == 0
assert main(["import", remote, orbax]) == 0
assert main(["verify", local, orbax]) == 0
assert main(["verify", orbax]) == 0
assert main(["inspect", orbax]) == 0
a, b = named_leaves(load(local)), named_leaves(load(orbax))
assert all(np.asarray(a[n]).tobytes() == np.asarray(b[n]).tobytes() for n in a)
"""


class Store(BaseHTTPRequestHandler):
    """As much of the JSON API of Google Cloud Storage as TensorStore uses."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm, wbufsize = True, 1 << 16  # else each answer waits 40 ms for the client's acknowledgement
    objects: ClassVar[dict[str, tuple[int, bytes]]] = {}
    lock = threading.Lock()
    generation = 0

    def _answer(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _asked(self) -> tuple[str, dict[str, str]]:
        url = urllib.parse.urlsplit(self.path)
        _, _, name = url.path.partition("/o/")
        return urllib.parse.unquote(name), dict(urllib.parse.parse_qsl(url.query))

    def do_GET(self) -> None:
        name, query = self._asked()
        if not name:
            names = sorted(n for n in self.objects if n.startswith(query.get("prefix", "")))
            names = [n for n in names if query.get("startOffset", "") <= n < query.get("endOffset", "\uffff")]
            items = [
                {"name": n, "generation": str(self.objects[n][0]), "size": str(len(self.objects[n][1]))} for n in names
            ]
            return self._answer(200, json.dumps({"items": items}).encode(), {"Content-Type": "application/json"})
        if name not in self.objects:
            return self._answer(404)
        generation, content = self.objects[name]
        headers = {"x-goog-generation": str(generation), "ETag": str(generation)}
        if query.get("ifGenerationNotMatch") == str(generation):
            return self._answer(304, headers=headers)
        if not (asked := self.headers.get("Range")):
            return self._answer(200, content, headers)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last or len(content)) + bool(last), len(content))
        if start >= len(content):
            return self._answer(416, headers={"Content-Range": f"bytes */{len(content)}"})
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        return self._answer(206, content[start:stop], headers)

    def do_POST(self) -> None:
        _, query = self._asked()
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name = query["name"]
        with self.lock:
            then = self.objects.get(name, (0, b""))[0]
            if query.get("ifGenerationMatch", str(then)) != str(then):
                return self._answer(412)
            Store.generation += 1
            self.objects[name] = (Store.generation, content)
            answer = {"name": name, "generation": str(Store.generation), "size": str(len(content))}
        return self._answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def do_DELETE(self) -> None:
        with self.lock:
            found = self.objects.pop(self._asked()[0], None)
        return self._answer(204 if found else 404)

    def log_message(self, *_args) -> None:
        pass


@pytest.fixture
def store():
    """The address of a running, empty store."""
    Store.objects.clear()
    server = ThreadingHTTPServer(("localhost", 0), Store)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://localhost:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_remote_checkpoint_is_imported_to_a_remote_folder_and_loaded(store, root, small, randomise, make):
    config = dataclasses.replace(small, num_layers=2, mla_layers=(1,))
    source = make(randomise(config), config)
    for file in source.iterdir():
        Store.objects[f"k3/hf/{file.name}"] = (1, file.read_bytes())
    env = {**os.environ, "TENSORSTORE_GCS_HTTP_URL": store, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none"}
    command = [sys.executable, "-c", CHECK, str(source), "gs://bucket/k3/hf", "gs://bucket/k3/orbax"]
    run = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    kept = {name.removeprefix("k3/orbax/").split("/")[0] for name in Store.objects if name.startswith("k3/orbax/")}
    assert kept == {"checksums", "config.json", "import.json", "model", "weights"}


def test_paths_of_both_kinds(tmp_path):
    assert Folder.at("gs://bucket/a/").url == "gs://bucket/a/"
    assert (Folder.at("gs://bucket/a") / "b").url == "gs://bucket/a/b/"
    assert Folder.at(tmp_path).url == f"file://{tmp_path}/"
    assert not File(Folder.at("gs://bucket/a"), "x").local
