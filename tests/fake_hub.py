"""A fake of the hub over HTTP on loopback, for the real huggingface_hub, datasets and transformers clients.

It answers their requests to read a repository, log in, make a repository and commit to it. Point a process
at it with the variables of ``FakeHub.environment``. Nothing is on disk, and nothing outlives the object.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

READER, WRITER = "hf_" + "reader" * 4, "hf_" + "writer" * 4
_LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".parquet", ".arrow")


@dataclass
class FakeRepo:
    """A repository: branches to commits, commits to whole trees of files."""

    kind: str
    name: str
    private: bool = False
    gated: bool = False
    license: str | None = None
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], message: str, branch: str = "main") -> str:
        """Make ``files`` the whole tree of ``branch``."""
        content = json.dumps({path: _sha256(data) for path, data in sorted(files.items())})
        sha = hashlib.sha1(f"{self.name} {len(self.commits)} {message} {content}".encode()).hexdigest()
        self.commits[sha] = files
        self.messages.append(message)
        self.branches[branch] = sha
        return sha

    def at(self, revision: str) -> str | None:
        """The commit a branch or a commit names."""
        return self.branches.get(revision) or (revision if revision in self.commits else None)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """The files at a branch or commit."""
        return self.commits[self.branches.get(revision, revision)]


class FakeHub:
    """The server. Use ``running()``.

    Attributes:
        repos: by kind and name, e.g. ``("model", "ada/sums")``.
        requests: method and path of every request, in order.
        failing: path pattern -> how many more requests to answer with HTTP 500.
        users: token -> name, organisations with the role in them, and role of the token.
        granted: tokens that may read gated repositories.
        sizes: file name -> the announced size, if it differs from the real size.
        slow: end of a path -> seconds to wait before its content is sent.
    """

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], FakeRepo] = {}
        self.requests: list[tuple[str, str]] = []
        self.failing: dict[str, int] = {}
        self.users = {
            WRITER: {"name": "ada", "orgs": {"sumlab": "write", "readers": "read"}, "role": "write"},
            READER: {"name": "ada", "orgs": {}, "role": "read"},
        }
        self.granted: set[str] = set()
        self.sizes: dict[str, int] = {}
        self.slow: dict[str, float] = {}
        self._closed = threading.Event()
        self.uploads: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator[FakeHub]:
        """Serve until the end of the block."""
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        try:
            yield self
        finally:
            self._closed.set()
            self._server.shutdown()
            self._server.server_close()

    def environment(self, token: str | None = None) -> dict[str, str]:
        """Variables that send a client here; without a token it is not logged in."""
        variables = {"HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        return {**variables, "HF_TOKEN": token} if token else variables

    def add(self, kind: str, name: str, files: dict[str, bytes] | Path, **facts: Any) -> FakeRepo:
        """Put a repository there, or another commit on its main branch."""
        if isinstance(files, Path):
            files = {str(path.relative_to(files)): path.read_bytes() for path in files.rglob("*") if path.is_file()}
        repo = self.repos.setdefault((kind, name), FakeRepo(kind, name, **facts))
        repo.commit(dict(files), "add files")
        return repo

    def asked(self, pattern: str) -> int:
        """How many requests had a path that matches."""
        return sum(bool(re.search(pattern, path)) for _, path in self.requests)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _blob_id(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


def _is_lfs(path: str) -> bool:
    return path.endswith(_LFS_SUFFIXES)


class _Answer(Exception):
    """What to answer, raised from anywhere."""

    def __init__(self, status: int, body: Any = None, headers: dict[str, str] | None = None, data: bytes = b""):
        super().__init__(status)
        self.status, self.headers = status, headers or {}
        self.data = data if body is None else json.dumps(body).encode()
        if body is not None:
            self.headers.setdefault("Content-Type", "application/json")


def _error(status: int, code: str, message: str = "") -> _Answer:
    return _Answer(status, {"error": message or code}, {"X-Error-Code": code, "X-Error-Message": message or code})


_REPO = r"(?P<name>[^/]+/[^/]+)"
_API = rf"/api/(?P<kind>model|dataset)s/{_REPO}"
_ROUTES = (
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate"),
    ("GET", rf"{_API}(/revision/(?P<revision>[^/]+))?", "info"),
    ("GET", rf"{_API}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", "tree"),
    ("POST", rf"{_API}/paths-info/(?P<revision>[^/]+)", "paths"),
    ("GET", rf"{_API}/refs", "refs"),
    ("POST", rf"{_API}/branch/(?P<revision>[^/]+)", "branch"),
    ("POST", rf"{_API}/preupload/(?P<revision>[^/]+)", "preupload"),
    ("POST", rf"{_API}/commit/(?P<revision>[^/]+)", "commit"),
    ("POST", rf"/(?P<datasets>datasets/)?{_REPO}\.git/info/lfs/objects/batch", "lfs"),
    ("PUT", r"/lfs-upload/(?P<oid>\w+)", "upload"),
    ("GET", rf"/(?P<datasets>datasets/)?{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
)


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(_FakeHubHandler):
        pass

    Handler.hub = hub
    return Handler


class _FakeHubHandler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Print nothing: ``FakeHub.requests`` has the requests."""

    def do_GET(self) -> None:
        self._serve("GET")

    def do_HEAD(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_PUT(self) -> None:
        self._serve("PUT")

    def _serve(self, method: str) -> None:
        parts = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.body = self._read_body()
        self.hub.requests.append((self.command, parts.path))
        try:
            self._wait_if_told(parts.path)
            self._fail_if_told(parts.path)
            for verb, pattern, name in _ROUTES:
                match = re.fullmatch(pattern, parts.path)
                if verb == method and match:
                    groups = {key: unquote(value) for key, value in match.groupdict().items() if value is not None}
                    getattr(self, f"_{name}")(**groups)
            raise _error(404, "EntryNotFound", f"the fake has no {method} {parts.path}")
        except _Answer as answer:
            self._send(answer)

    def _wait_if_told(self, path: str) -> None:
        for end, seconds in self.hub.slow.items():
            if path.endswith(end) and self.command != "HEAD":
                self.hub._closed.wait(seconds)

    def _fail_if_told(self, path: str) -> None:
        for pattern, count in self.hub.failing.items():
            if count > 0 and re.search(pattern, path):
                self.hub.failing[pattern] = count - 1
                raise _Answer(500, {"error": "Internal Server Error"})

    def _read_body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            chunks = []
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _send(self, answer: _Answer) -> None:
        self.send_response(answer.status)
        for name, value in {"Content-Length": str(len(answer.data)), **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError):  # the client may have been killed in the meantime
                self.wfile.write(answer.data)

    @property
    def _token(self) -> str | None:
        return self.headers.get("Authorization", "").removeprefix("Bearer ") or None

    def _size(self, path: str, data: bytes) -> int:
        return self.hub.sizes.get(path, len(data))

    def _file_entry(self, path: str, data: bytes) -> dict[str, Any]:
        size = self._size(path, data)
        entry: dict[str, Any] = {"type": "file", "path": path, "size": size, "oid": _blob_id(data)}
        if _is_lfs(path):
            entry["lfs"] = {"oid": _sha256(data), "size": size, "pointerSize": 130}
        return entry

    def _user(self) -> dict[str, Any]:
        user = self.hub.users.get(self._token or "")
        if user is None:
            raise _Answer(401, {"error": "Invalid username or password."})
        return user

    def _writable(self, name: str) -> None:
        user = self._user()
        mine = [user["name"], *(org for org, role in user["orgs"].items() if role != "read")]
        if user["role"] == "read" or name.split("/")[0] not in mine:
            raise _Answer(403, {"error": f"You don't have the rights to write to {name}"})

    def _repo(self, kind: str, name: str) -> FakeRepo:
        repo = self.hub.repos.get((kind, name))
        if repo is None or (repo.private and self._token not in self.hub.users):
            raise _error(404 if self._token in self.hub.users else 401, "RepoNotFound", "Repository not found")
        return repo

    def _at(self, kind: str, name: str, revision: str) -> tuple[FakeRepo, str]:
        repo = self._repo(kind, name)
        sha = repo.at(revision)
        if sha is None:
            raise _error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repo, sha

    def _whoami(self) -> None:
        user = self._user()
        orgs = [{"name": org, "roleInOrg": role} for org, role in user["orgs"].items()]
        token = {"accessToken": {"displayName": "test", "role": user["role"]}}
        raise _Answer(200, {"type": "user", "name": user["name"], "orgs": orgs, "auth": token})

    def _info(self, kind: str, name: str, revision: str = "main") -> None:
        repo, sha = self._at(kind, name, revision)
        files = repo.commits[sha]
        siblings = [{"rfilename": path} for path in sorted(files)]
        if "blobs" in self.query:
            siblings = [{"rfilename": path, "size": self._size(path, files[path])} for path in sorted(files)]
        card = {"license": repo.license} if repo.license else {}
        facts = {"private": repo.private, "gated": "manual" if repo.gated else False, "tags": [], "downloads": 0}
        raise _Answer(200, {"_id": name, "id": name, "sha": sha, "siblings": siblings, "cardData": card, **facts})

    def _tree(self, kind: str, name: str, revision: str, folder: str = "") -> None:
        repo, sha = self._at(kind, name, revision)
        inside = f"{folder}/" if folder else ""
        paths = [path for path in sorted(repo.commits[sha]) if path.startswith(inside)]
        if folder and not paths:
            raise _error(404, "EntryNotFound", f"{folder} does not exist")
        entries, folders = [], []
        for path in paths:
            below = path.removeprefix(inside)
            if "/" in below:
                folders.append(inside + below.split("/")[0])
            if "/" not in below or self.query.get("recursive", "").lower() == "true":
                entries.append(self._file_entry(path, repo.commits[sha][path]))
        directories = [
            {"type": "directory", "path": folder, "size": 0, "oid": "0" * 40} for folder in dict.fromkeys(folders)
        ]
        raise _Answer(200, directories + entries)

    def _paths(self, kind: str, name: str, revision: str) -> None:
        repo, sha = self._at(kind, name, revision)
        is_json = self.headers.get("Content-Type", "").startswith("application/json")
        paths = json.loads(self.body)["paths"] if is_json else parse_qs(self.body.decode()).get("paths", [])
        files = repo.commits[sha]
        entries = [self._file_entry(path, files[path]) for path in paths if path in files]
        entries += [
            {"type": "directory", "path": path, "size": 0, "oid": "0" * 40}
            for path in paths
            if path not in files and any(other.startswith(f"{path}/") for other in files)
        ]
        raise _Answer(200, entries)

    def _refs(self, kind: str, name: str) -> None:
        repo = self._repo(kind, name)
        branches = [
            {"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": sha}
            for branch, sha in repo.branches.items()
        ]
        raise _Answer(200, {"branches": branches, "converts": [], "tags": []})

    def _resolve(self, name: str, revision: str, path: str, datasets: str = "") -> None:
        repo, sha = self._at("dataset" if datasets else "model", name, revision)
        if repo.gated and self._token not in self.hub.granted:
            status = 401 if self._token is None else 403
            raise _error(status, "GatedRepo", f"Access to {name} is restricted, you are not in the authorized list.")
        if path not in repo.commits[sha]:
            raise _Answer(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
        data = repo.commits[sha][path]
        etag = _sha256(data) if _is_lfs(path) else _blob_id(data)
        headers = {"X-Repo-Commit": sha, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if _is_lfs(path):
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(self._size(path, data))}
        byte_range = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if byte_range is None:
            raise _Answer(200, None, headers, data)
        first, last = int(byte_range[1]), int(byte_range[2] or len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        raise _Answer(206, None, headers, data[first : last + 1])

    def _create(self) -> None:
        request = json.loads(self.body)
        name = f"{request.get('organization') or self._user()['name']}/{request['name']}"
        self._writable(name)
        key = (request.get("type") or "model", name)
        if key in self.hub.repos:
            raise _Answer(409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"})
        repo = FakeRepo(*key, private=request.get("visibility") == "private" or bool(request.get("private")))
        repo.commit({".gitattributes": b""}, "initial commit")
        self.hub.repos[key] = repo
        raise _Answer(200, {"url": f"{self.hub.url}/{name}", "name": name, "id": name})

    def _branch(self, kind: str, name: str, revision: str) -> None:
        self._writable(name)
        repo = self._repo(kind, name)
        if revision in repo.branches:
            raise _Answer(409, {"error": "Reference already exists"})
        repo.branches[revision] = repo.branches["main"]
        raise _Answer(200, {})

    def _validate(self) -> None:
        raise _Answer(200, {"errors": [], "warnings": []})

    def _preupload(self, kind: str, name: str, revision: str) -> None:
        self._writable(name)
        repo, sha = self._at(kind, name, revision)
        ids = {path: _sha256(data) if _is_lfs(path) else _blob_id(data) for path, data in repo.commits[sha].items()}
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if _is_lfs(file["path"]) else "regular",
                "shouldIgnore": False,
                "oid": ids.get(file["path"]),
            }
            for file in json.loads(self.body)["files"]
        ]
        raise _Answer(200, {"files": files, "commitOid": sha})

    def _lfs(self, name: str, datasets: str = "") -> None:
        self._writable(name)
        objects = [
            {"oid": blob["oid"], "size": blob["size"]}
            if blob["oid"] in self.hub.uploads
            else {
                "oid": blob["oid"],
                "size": blob["size"],
                "actions": {"upload": {"href": f"{self.hub.url}/lfs-upload/{blob['oid']}"}},
            }
            for blob in json.loads(self.body)["objects"]
        ]
        raise _Answer(200, {"transfer": "basic", "objects": objects})

    def _upload(self, oid: str) -> None:
        if _sha256(self.body) != oid:
            raise _Answer(400, {"error": "the content does not match the announced digest"})
        self.hub.uploads[oid] = self.body
        raise _Answer(200, {})

    def _commit(self, kind: str, name: str, revision: str) -> None:
        self._writable(name)
        repo, sha = self._at(kind, name, revision)
        files, message = dict(repo.commits[sha]), ""
        for line in self.body.splitlines():
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "header":
                message = value["summary"]
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
            elif key == "deletedFolder":
                folder = value["path"].rstrip("/") + "/"
                files = {path: data for path, data in files.items() if not path.startswith(folder)}
        new = repo.commit(files, message, branch=revision)
        raise _Answer(200, {"success": True, "commitOid": new, "commitUrl": f"{self.hub.url}/{name}/commit/{new}"})
