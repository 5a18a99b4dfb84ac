"""Who may use the web view: token, host name, origin; and that no address leads out of the store."""

import json

import pytest

from joulelab.runs.store import run_folders


def test_without_the_token_or_with_a_wrong_one_nothing_is_answered(server, store):
    (run,) = run_folders(store)
    for path in ("/", "/api/runs", "/api/runs/events", f"/runs/{run.name}", "/assets/page.css", "/nothing"):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": "joulelab-1=wrong"}):
            status, _, text = server.get(path, token=False, **headers)
            assert (status, run.name in text) == (403, False), path
        assert server.get(f"{path}?token=wrong", token=False)[0] == 403
    assert server.get("/?token=%C3%A4", token=False)[0] == 403
    assert server.get("/")[0] == 200


def test_the_printed_address_gives_a_cookie_and_is_left_without_the_token(server):
    path = server.url.removeprefix(server.address)
    status, headers, _ = server.get(f"{path}&find=a%20b", token=False)
    assert (status, headers["location"]) == (303, "/?find=a+b")
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie
    assert server.get("/", token=False, Cookie=cookie.partition(";")[0])[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "", "[::2]", "a b"])
def test_another_host_name_is_refused(server, host):
    status, _, text = server.get("/", Host=host)
    assert status == 403 and "host name" in text


def test_names_of_this_machine_are_accepted_on_any_port(server):
    for host in ("localhost", "127.0.0.1:1", "localhost:9999", "[::1]:8765"):
        assert server.get("/", Host=host)[0] == 200


def test_on_all_addresses_the_one_that_the_request_was_sent_to_is_accepted(store, start_server):
    """Other machines may know no name of this one."""
    everywhere = start_server(store, "--host", "0.0.0.0")
    port = everywhere.address.rpartition(":")[2]
    try:
        for address, host, expected in (
            ("127.0.0.2", f"127.0.0.2:{port}", 200),
            ("127.0.0.2", "127.0.0.3", 403),
            ("127.0.0.1", "evil.example", 403),
        ):
            everywhere.address = f"http://{address}:{port}"
            assert everywhere.get("/", Host=host)[0] == expected, host
    finally:
        everywhere.end()


def test_another_origin_can_neither_read_nor_stop(server, store):
    (run,) = run_folders(store)
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", "https://localhost"):
        assert server.get("/api/runs", Origin=origin)[0] == 403
        assert server.get(f"/api/runs/{run.name}/stop", "POST", Origin=origin)[0] == 403
    cookie = server.get(server.url.removeprefix(server.address), token=False)[1]["set-cookie"].partition(";")[0]
    stop = f"/api/runs/{run.name}/stop"
    no_origin = server.get(stop, "POST", token=False, Cookie=cookie)
    assert no_origin[0] == 403 and "without an Origin header" in no_origin[2]
    status, _, text = server.get(
        f"/api/runs/{run.name}/stop", "POST", token=False, Cookie=cookie, Origin=server.address
    )
    assert status == 400 and "is not running" in json.loads(text)["error"], "same origin: the request is understood"
    assert server.get(stop)[0] == 405, "a link cannot stop a run"


def test_every_answer_forbids_other_origins_and_inline_scripts(server):
    for path, token in (("/", True), ("/api/runs", True), ("/nothing", True), ("/", False)):
        headers = server.get(path, token=token)[1]
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self' 'unsafe-eval';" in policy
        assert "http" not in policy and "*" not in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    "path",
    [
        "/runs/..",
        "/runs/.",
        "/runs/..%2f..%2fetc",
        "/runs/%2e%2e",
        "/runs/groups",
        "/runs/a%00b",
        "/groups/..",
        "/groups/%2e%2e%2f",
        "/assets/..%2fserver.py",
        "/assets/server.py",
        "/compare?run=../../etc",
        "/compare?group=..",
        "/report.html?run=%2fetc%2fpasswd",
        f"/runs/{'a' * 300}",
        f"/groups/{'a' * 300}",
        "/runs/%00",
    ],
)
def test_no_address_leads_out_of_the_store(server, path):
    status, _, text = server.get(path)
    assert status == 404 and "root:" not in text and "Traceback" not in text


def test_bad_options_are_explained(joulelab, tmp_path, server):
    code, _, err = joulelab("ui", "--runs-dir", tmp_path / "none")
    assert code == 2 and "no store at" in err and "joulelab measure -- python train.py" in " ".join(err.split())
    taken = server.address.rpartition(":")[2]
    code, _, err = joulelab("ui", "--runs-dir", tmp_path, "--port", taken)
    assert code == 2 and f"port {taken}" in err and "--port" in err
    code, _, err = joulelab("ui", "--runs-dir", tmp_path, "--port", "99999")
    assert code == 2 and "65535" in err
    code, _, err = joulelab("ui", "--runs-dir", tmp_path, "--host", "no.such.host.example")
    assert code == 2 and "no.such.host.example" in err
    for host in ("300.1.1.1", "192.0.2.1"):  # no address at all, and one for documentation (RFC 5737)
        code, _, err = joulelab("ui", "--runs-dir", tmp_path, "--host", host)
        assert code == 2 and f"{host}: it is not an address of this machine" in err
        assert "--host" in err and "--port" not in err
