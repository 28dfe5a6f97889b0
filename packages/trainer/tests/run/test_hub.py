"""``run.push_to_hub``, against a server on this machine that speaks the hub's protocol."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from rl_runs import tree

from engine_api.errors import ConfigError
from engine_trainer.config.sections import RunSection

pytest.importorskip("engine_fsdp", reason="the runs need an engine")
TOKEN = "hf_of_the_owner"


class Hub:
    """A server with one repository ``owner/name``, which one token may write to.

    Attributes:
        files: content of the committed files by path.
        created: what the calls that create a repository asked for.
        is_open: False refuses every commit.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.created: list[dict[str, object]] = []
        self.messages: list[str] = []
        self.is_open = True
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    return self.answer(401, {"error": "Invalid username or password."})
                return self.answer(*hub.answer(self.path, body, self.headers["Host"]))

            def answer(self, status: int, value: object) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path: str, body: bytes, host: str) -> tuple[int, object]:
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return 200, {"url": f"http://{host}/owner/name"}
        if path == "/api/models/owner/name/preupload/main":
            files = json.loads(body)["files"]
            modes = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files
            ]
            return 200, {"files": modes}
        if path == "/api/models/owner/name/commit/main" and self.is_open:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    value = line["value"]
                    self.files[value["path"]] = base64.b64decode(value["content"])
                else:
                    self.messages.append(line["value"]["summary"])
            return 200, {
                "commitUrl": f"http://{host}/owner/name/commit/1",
                "commitOid": "1",
                "pullRequestUrl": None,
            }
        return 403, {"error": "the repository is read-only"}


@pytest.fixture
def hub():
    made = Hub()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def train(hub, sums_model, tmp_path):
    """Run ``engine-train rl`` with the hub's address, and return the finished process."""

    def run(token: str = TOKEN, name: str = "owner/name") -> subprocess.CompletedProcess[str]:
        config = tree(
            sums_model,
            tmp_path / "out",
            reward={"name": "exact"},
            run={"push_to_hub": name, "report": True},
        )
        (tmp_path / "rl.yaml").write_text(yaml.safe_dump(config))
        return subprocess.run(
            [sys.executable, "-m", "engine_trainer", "rl", str(tmp_path / "rl.yaml")],
            env=os.environ | {"HF_ENDPOINT": hub.address, "HF_TOKEN": token, "HF_HUB_OFFLINE": "0"},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.mark.slow
def test_the_model_of_the_last_step_is_pushed(train, hub, tmp_path):
    done = train()
    assert done.returncode == 0, done.stderr
    assert f"{hub.address}/owner/name/commit/1" in done.stderr
    (created,) = hub.created
    assert (created["name"], created["organization"]) == ("name", "owner")
    # How a repository is made private depends on the release of huggingface_hub.
    assert created.get("private") is True or created.get("visibility") == "private"
    written = {p.name: p.read_bytes() for p in (tmp_path / "out" / "hf").iterdir()}
    assert hub.files == written
    assert any(name.endswith(".safetensors") for name in written)
    assert hub.messages == ["rl, step 3"]


@pytest.mark.slow
def test_without_the_right_to_write_nothing_begins(train, hub, tmp_path):
    done = train(token="hf_of_a_stranger")
    assert done.returncode == 2
    assert "run.push_to_hub: the hub gives no repository 'owner/name' to write to" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_push_that_fails_loses_nothing_and_the_same_command_pushes_again(train, hub, tmp_path):
    hub.is_open = False
    done = train()
    assert done.returncode == 2
    assert "the model was not pushed to 'owner/name'" in done.stderr
    assert "the same command pushes it again" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "out" / "report.html").is_file()

    hub.is_open = True
    assert train().returncode == 0
    assert "config.json" in hub.files


@pytest.mark.slow
def test_a_malformed_name_is_refused_before_the_run(train):
    done = train(name="owner/name/extra")
    assert done.returncode == 2
    assert "run.push_to_hub" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_folder_there_is_nothing_to_push():
    with pytest.raises(ConfigError, match=r"'owner/name', but run.save_hf is false"):
        RunSection(output_dir="out", steps=1, save_hf=False, push_to_hub="owner/name")
