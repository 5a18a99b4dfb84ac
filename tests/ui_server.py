"""A server of the web view in a separate process."""

import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request


class Server:
    def __init__(self, store, *options, env=None):
        words = [sys.executable, "-m", "joulelab", "ui", "--port", "0", "--runs-dir", str(store), *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(words, **pipes, env=env)
        self.url = self.process.stdout.readline().strip()
        self.errors = []
        threading.Thread(target=lambda: self.errors.extend(self.process.stderr), daemon=True).start()
        found = re.fullmatch(r"(http://[^/]+)/\?token=([\w-]{43})", self.url)
        assert found, (self.url, self.errors)
        self.address, self.token = found.groups()

    def get(self, path, method="GET", token=True, **headers):
        """Status, headers and text of an answer."""
        headers = {"Authorization": f"Bearer {self.token}", **headers} if token else headers
        request = urllib.request.Request(self.address + path, headers=headers, method=method)
        try:
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=60) as answer:
                return answer.status, answer.headers, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read().decode()

    def end(self):
        self.process.terminate()
        self.process.wait(20)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None
