"""`grpo dashboard`: only the token opens its pages, they show new rows, and a long file is not read again."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from documented import documented

from grpo_recipes.console.dashboard import samples
from grpo_recipes.console.dashboard.command import Pages, find_folder
from grpo_recipes.console.dashboard.pages import LivePage
from grpo_recipes.console.dashboard.samples import BoundedCopy
from grpo_recipes.console.dashboard.server import Dashboard
from grpo_recipes.console.report.page import Polling
from grpo_recipes.errors import ConfigError

from ..report.synthetic_runs import make_run

ROW = {"max_steps": 60, "seconds/step": 1.0, "loss": 0.0}


@contextlib.contextmanager
def serving(folder: Path, copies: Path) -> Iterator[Dashboard]:
    with Dashboard(Pages(folder, copies).find) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: Dashboard, path: str, host: str | None = None, method: str = "GET") -> tuple[int, str, str]:
    """Return status, version and text of an answer; the path is below the token if it doesn't begin with a slash."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(
        method, path if path.startswith("/") else f"/{server.token}/{path}", headers={"Host": host} if host else {}
    )
    answer = connection.getresponse()
    return answer.status, answer.getheader("ETag", ""), answer.read().decode()


def append_row(run: Path, step: int, reward: float) -> None:
    with (run / "metrics.jsonl").open("a") as rows:
        rows.write(json.dumps({**ROW, "step": step, "reward": reward}) + "\n")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_run(root, "done-20261120-101500", steps=10)
    make_run(root, "live-20261120-101501", steps=10, summary={"status": "running"})
    make_run(root / "sweeps/lr/cells", "seed=1", steps=3)
    return root


@pytest.fixture(scope="module")
def server(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    with serving(runs, tmp_path_factory.mktemp("copies")) as server:
        yield server


def test_only_the_token_and_a_local_host_name_open_pages(server: Dashboard, capfd: pytest.CaptureFixture[str]) -> None:
    assert get(server, "")[0] == 200
    assert get(server, "", host=f"localhost:{server.server_port + 1}")[0] == 200  # another port of an SSH tunnel
    for path in ("/", "/wrong/", f"/{server.token[:-1]}/", f"/x{server.token}/", "/runs", "/%00/"):
        status, _, text = get(server, path)
        assert status == 403 and server.token not in text
    for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1.evil.example", "["):
        assert get(server, "", host=host)[0] in (400, 403), host
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert get(server, "", method=method)[0] == 501
    assert server.token not in "".join(capfd.readouterr())


def test_no_path_reads_another_file(server: Dashboard, runs: Path) -> None:
    (runs / "secret.txt").write_text("planted")
    name = re.findall(r'href="(run/\w+/)"', get(server, "")[2])[0]
    for path in (
        "secret.txt", "../secret.txt", "%2e%2e/secret.txt", "run/../secret.txt", f"{name}run.json",
        f"{name}../../secret.txt", f"{name}%2e%2e/run.json", "run//etc/passwd", "run/done-20261120-101500/",
    ):  # fmt: skip
        status, _, text = get(server, path)
        assert status == 404 and "planted" not in text, path


def test_the_list_and_the_report_show_new_rows_once(server: Dashboard, runs: Path) -> None:
    _, version, page = get(server, "")
    rows = {match[1]: match[0] for match in re.findall(r'<tr>(<td><a href="run/\w+/">([^<]+)</a>.*?)</tr>', page)}
    assert set(rows) == {"done-20261120-101500", "live-20261120-101501", "sweeps/lr/cells/seed=1"}
    assert "<td>10/10</td>" in rows["live-20261120-101501"] and "<polyline" in rows["live-20261120-101501"]
    assert get(server, f"?since={version}")[:2] == (204, version)
    report = re.findall(r'href="(run/\w+/)"', rows["live-20261120-101501"])[0]
    _, report_version, report_page = get(server, report)
    assert "over 10 steps" in report_page and 'class="live"' not in report_page

    append_row(runs / "live-20261120-101501", 11, 0.9)

    for path, old, text in (("", version, "<td>11/60</td>"), (report, report_version, "over 11 steps")):
        deadline = time.monotonic() + 60
        while (answer := get(server, f"{path}?since={old}"))[0] == 204:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert text in answer[2] and answer[1] != old
        assert "connect-src 'self'" in answer[2] and answer[2].count("</script>") == 2


def test_a_damaged_run_is_shown_as_such(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", steps=3)
    (run / "summary.json").write_text("no json")
    with serving(tmp_path / "runs", tmp_path / "copies") as server:
        page = get(server, "")[2]
        assert "is damaged" in page
        assert "is damaged" in get(server, re.findall(r'href="(run/\w+/)"', page)[0])[2]


class SlowPage(LivePage):
    def read_state(self) -> object:
        return 0

    def render(self, polling: Polling) -> str:
        time.sleep(2)
        return "<body></body>"


def test_more_connections_than_slots_are_closed_and_the_others_answered() -> None:
    page = SlowPage()
    with Dashboard(lambda path: page) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        idle = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(16)]
        deadline = time.monotonic() + 30
        while True:  # until all idle connections have a thread, a request may still be answered
            with contextlib.suppress(ConnectionError, http.client.RemoteDisconnected):
                assert get(server, "")[0] == 200
                assert time.monotonic() < deadline
                continue
            break
        for connection in idle:
            connection.close()
        while True:
            with contextlib.suppress(ConnectionError, http.client.RemoteDisconnected):
                assert get(server, "")[0] == 200
                break
            assert time.monotonic() < deadline
        server.shutdown()


def test_a_long_file_of_samples_is_read_once_and_copied_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "_LONG_BYTES", 100_000)
    monkeypatch.setattr(samples, "_COPY_BYTES", 50_000)
    run = make_run(tmp_path, steps=400)
    copy = BoundedCopy(run, tmp_path / "copies")

    def steps() -> list[int]:
        folder = copy.update()
        assert folder != run and (folder / "metrics.jsonl").read_text() == (run / "metrics.jsonl").read_text()
        rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        assert (folder / "samples.jsonl").stat().st_size <= 50_000
        return [row["step"] for row in rows]

    first = steps()
    assert first[0] == 1 and first[-1] == 400 and len({b - a for a, b in pairwise(first[:-1])}) == 1
    with (run / "samples.jsonl").open("r+b") as file:
        file.write(b"x" * 1000)  # a second read of the beginning would show it
        file.seek(0, os.SEEK_END)
        file.write(b'{"step": 401, "rewards": [1.0], "samples": []}\n{"step": 402')
    assert steps()[0] == 1 and steps()[-1] == 401
    (run / "samples.jsonl").unlink()
    (run / "samples.jsonl").write_text(
        "".join(json.dumps({"step": step, "rewards": [0.5] * 100}) + "\n" for step in range(300))
    )
    assert steps()[0] == 0 and steps()[-1] == 299


def test_the_command_prints_the_tunnel_and_ends_with_ctrl_c(runs: Path) -> None:
    process = subprocess.Popen(
        documented("grpo dashboard"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "RUN_ROOT": str(runs)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in background jobs
    )  # fmt: skip
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    (port, token) = re.findall(r"http://127\.0\.0\.1:(\d+)/([\w-]+)/", lines[0])[0]
    assert f"ssh -L {port}:127.0.0.1:{port} " in lines[1]
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
    connection.request("GET", f"/{token}/")
    assert connection.getresponse().status == 200
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0 and time.monotonic() - start < 5
    assert "Traceback" not in process.stdout.read()


def test_a_wrong_folder_or_port_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory"):
        find_folder(str(tmp_path / "none"))
    with socket.create_server(("127.0.0.1", 0)) as busy, pytest.raises(ConfigError, match="--port: can't listen"):
        Dashboard(lambda path: None, busy.getsockname()[1])
