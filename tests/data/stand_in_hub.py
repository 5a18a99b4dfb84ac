"""A stand-in for the hub: as much of its protocol as its own clients ask for when they read a dataset.

Started in a thread of the test; the clients find it through HF_ENDPOINT, which they read when they are imported.
"""

import hashlib
import http.server
import json
import threading

REVISION = "a" * 40


def serve(datasets):
    """`datasets` is name -> file -> bytes. The server; its address is `http://127.0.0.1:PORT`."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.datasets = datasets
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        words = self.path.partition("?")[0].strip("/").split("/")
        if words[:2] == ["api", "datasets"]:
            self._describe("/".join(words[2:4]), words[4:])
        elif words[0] == "datasets" and words[3:4] == ["resolve"]:
            self._deliver("/".join(words[1:3]), "/".join(words[5:]))
        else:
            self._answer(b"{}", 404)

    do_HEAD = do_GET  # noqa: N815

    def _describe(self, name, requested):
        files = self.server.datasets.get(name)
        if files is None:
            self._answer(b"{}", 404)
        elif requested[:1] == ["tree"]:
            self._list(files, "/".join(requested[2:]))
        else:
            siblings = [{"rfilename": file} for file in files]
            about = {"id": name, "sha": REVISION, "private": False, "tags": [], "siblings": siblings}
            self._answer(json.dumps(about).encode())

    def _list(self, files, folder):
        inside = [file for file in files if file.rpartition("/")[0] == folder]
        rows = [{"type": "file", "path": file, "size": len(files[file]), "oid": _hash(files[file])} for file in inside]
        folders = {file.partition("/")[0] for file in files if "/" in file} if not folder else set()
        rows += [{"type": "directory", "path": one, "oid": _hash(one.encode())} for one in sorted(folders)]
        self._answer(json.dumps(rows).encode())

    def _deliver(self, name, file):
        data = self.server.datasets.get(name, {}).get(file)
        if data is None:
            self._answer(b"", 404, **{"X-Error-Code": "EntryNotFound"})
            return
        headers = {"ETag": f'"{_hash(data)}"', "X-Repo-Commit": REVISION, "Accept-Ranges": "bytes"}
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
