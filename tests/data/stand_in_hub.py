"""A stand-in for the hub: as much of its protocol as its own clients ask for when they read a dataset or a model.

Started in a thread of the test; the clients find it through HF_ENDPOINT, which they read when they are imported.
"""

import hashlib
import http.server
import json
import threading

REVISION = "a" * 40


def serve(datasets, models=None):
    """`datasets` is name -> file -> bytes; `models` is name -> branch or tag -> (commit, file -> bytes), and may be
    changed while the server runs. The server; its address is `http://127.0.0.1:PORT`."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.repos = {"datasets": {name: {"main": (REVISION, files)} for name, files in datasets.items()}}
    server.repos["models"] = models if models is not None else {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        words = self.path.partition("?")[0].strip("/").split("/")
        if words[:1] == ["api"] and words[1:2] in (["datasets"], ["models"]):
            self._describe(words[1], "/".join(words[2:4]), words[4:])
        elif "resolve" in words[2:4]:
            kind, words = ("datasets", words[1:]) if words[0] == "datasets" else ("models", words)
            self._deliver(kind, "/".join(words[:2]), words[3], "/".join(words[4:]))
        else:
            self._answer(b"{}", 404)

    do_HEAD = do_GET  # noqa: N815

    def _find(self, kind, name, revision):
        """(commit, files), or None after an answer that says what is not there."""
        revisions = self.server.repos[kind].get(name)
        if revisions is None:
            self._answer(b"{}", 404, **{"X-Error-Code": "RepoNotFound"})
            return None
        found = revisions.get(revision) or next((one for one in revisions.values() if one[0] == revision), None)
        if found is None:
            self._answer(b"{}", 404, **{"X-Error-Code": "RevisionNotFound"})
        return found

    def _describe(self, kind, name, requested):
        if requested[:1] == ["refs"]:
            branches = [{"name": ref, "ref": f"refs/heads/{ref}", "targetCommit": commit}
                        for ref, (commit, _) in self.server.repos[kind][name].items()]  # fmt: skip
            self._answer(json.dumps({"branches": branches, "tags": [], "converts": []}).encode())
            return
        found = self._find(kind, name, requested[1] if requested[1:] else "main")
        if found is None:
            return
        commit, files = found
        if requested[:1] == ["tree"]:
            self._list(files, "/".join(requested[2:]))
        else:
            siblings = [{"rfilename": file} for file in files]
            about = {"id": name, "sha": commit, "private": False, "tags": [], "siblings": siblings}
            self._answer(json.dumps(about).encode())

    def _list(self, files, folder):
        inside = [file for file in files if file.rpartition("/")[0] == folder]
        rows = [{"type": "file", "path": file, "size": len(files[file]), "oid": _hash(files[file])} for file in inside]
        folders = {file.partition("/")[0] for file in files if "/" in file} if not folder else set()
        rows += [{"type": "directory", "path": one, "oid": _hash(one.encode())} for one in sorted(folders)]
        self._answer(json.dumps(rows).encode())

    def _deliver(self, kind, name, revision, file):
        found = self._find(kind, name, revision)
        if found is None:
            return
        commit, files = found
        data = files.get(file)
        if data is None:
            self._answer(b"", 404, **{"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        headers = {"ETag": f'"{_hash(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        first, _, last = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        if not first:
            self._answer(data, **headers)
            return
        end = min(int(last), len(data) - 1) if last else len(data) - 1
        headers["Content-Range"] = f"bytes {first}-{end}/{len(data)}"
        self._answer(data[int(first) : end + 1], 206, **headers)

    def _answer(self, body, status=200, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *ignored): ...


def _hash(data):
    return hashlib.sha1(data).hexdigest()
