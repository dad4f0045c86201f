"""The demo's server: what it refuses, and that it stays upright whatever it is sent."""

import contextlib
import http.client
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

import scalesteer.app.demo
from scalesteer.app import cli
from scalesteer.app.demo import DemoModel, DemoServer, app
from tests.app.drawings import draw_seven, to_bytes

SEVEN = to_bytes(draw_seven())
PNG = {"Content-Type": "image/png"}


@pytest.fixture(scope="module")
def model():
    return DemoModel("digits")


@pytest.fixture
def server(model):
    with DemoServer(model) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, method, path, body=None, headers=()):
    """Status, headers and content of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=300)
    try:
        connection.request(method, path, body, dict(headers))
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def send(server, *pieces, pause=0.0):
    """What comes back for bytes that are sent as they are."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=300) as connection:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(pause)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def said(content):
    return json.loads(content)["error"]


def test_the_page_and_all_that_it_loads_come_from_here(server):
    for path, (name, kind) in app.STATIC.items():
        status, headers, content = ask(server, "GET", path)
        assert (status, headers["Content-Type"]) == (200, kind)
        assert content == (Path(app.__file__).parent / "static" / name).read_bytes()
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        loaded = re.findall(rb"(?:src|href)=\"([^\"]*)\"|url\(([^)]*)\)|import\s", content)
        assert all(first in (b"app.js", b"style.css", b"data:,") for first, _ in loaded)
    for asked in (
        ("GET", "/"),
        ("GET", "/network"),
        ("GET", "/none"),
        ("POST", "/curve"),
        ("POST", "/none"),
        ("PUT", "/"),
    ):
        headers = ask(server, *asked, SEVEN if asked[0] == "POST" else None, PNG)[1]
        assert {"frame-ancestors 'none'", "default-src 'none'", "form-action 'none'", "base-uri 'none'"} <= set(
            headers["Content-Security-Policy"].split("; ")
        )
        assert headers["Cache-Control"] == "no-store"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["X-Content-Type-Options"] == "nosniff"
    assert json.loads(ask(server, "GET", "/network")[2])["classes"] == [str(digit) for digit in range(10)]


def test_it_listens_on_this_machine_only(server):
    assert server.server_address[0] == "127.0.0.1"
    assert "0.0.0.0" not in Path(app.__file__).read_text()


def test_a_picture_gets_its_answer_and_its_curve(server, model):
    picture, _ = model.read(SEVEN)
    status, headers, content = ask(server, "POST", "/answer?size=2", SEVEN, PNG)
    assert status == 200
    assert headers["Content-Type"] == "application/json"
    assert json.loads(content) == json.loads(json.dumps(model.answer(picture, 2.0) | {"inverted": False}))
    status, _, content = ask(server, "POST", "/curve", SEVEN, PNG)
    assert (status, json.loads(content)["label"]) == (200, 7)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Host", "evil.example"),
        ("Host", "evil.example:{port}"),
        ("Host", "127.0.0.1"),
        ("Host", "127.0.0.1:{port}.evil.example"),
        ("Origin", "http://evil.example"),
        ("Origin", "null"),
        ("Origin", "https://127.0.0.1:{port}"),
        ("Origin", "http://127.0.0.1:{port}.evil.example"),
    ],
)
@pytest.mark.parametrize("path", ["/", "/network", "/answer?size=1"])
def test_other_sites_are_refused(server, name, value, path):
    headers = {**PNG, name: value.format(port=server.server_port)}
    method = "POST" if "answer" in path else "GET"
    assert ask(server, method, path, SEVEN if method == "POST" else None, headers)[0] == 403


def test_two_hosts_or_none_are_refused_and_its_own_names_are_not(server):
    port = server.server_port
    own = f"Host: 127.0.0.1:{port}\r\n".encode()
    assert b" 403 " in send(server, b"GET / HTTP/1.1\r\n" + own + b"Host: evil.example\r\n\r\n")
    assert b" 403 " in send(server, b"GET / HTTP/1.0\r\n\r\n")
    for name in ("127.0.0.1", "localhost"):
        headers = {"Host": f"{name}:{port}", "Origin": f"http://{name}:{port}"}
        assert ask(server, "POST", "/answer?size=1", SEVEN, {**PNG, **headers})[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../app.py", "/static/../app.py", "/..%2fapp.py", "/%2e%2e/app.py", "/%2e%2e%2fapp.py", "/....//app.py",
        "//app.py", "/..\\app.py", "/app.js/../app.py", "/app.js%00.py", "/etc/passwd", "/static/app.js", "/app.py",
        "/.", "/%2e", "/index.html",
    ],
)  # fmt: skip
def test_there_are_no_other_files(server, path):
    assert ask(server, "GET", path)[0] == 404
    assert ask(server, "POST", path, SEVEN, PNG)[0] == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Length": str((5 << 20) + 1)}, 413),
        ({"Content-Length": "9" * 30}, 413),
        ({"Content-Length": "-1"}, 411),
        ({"Content-Length": "1e3"}, 411),
        ({"Content-Length": "٣"}, 411),
        ({}, 411),
        ({"Transfer-Encoding": "chunked", "Content-Length": "10"}, 411),
        ({"Content-Length": "3", "Content-Type": "text/html"}, 415),
        ({"Content-Length": "3", "Content-Type": "application/x-www-form-urlencoded"}, 415),
    ],
)
def test_what_is_too_large_or_says_no_length_is_refused_unread(server, headers, status):
    fields = {"Host": f"127.0.0.1:{server.server_port}", **PNG, **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    started = time.monotonic()
    answer = send(server, f"POST /curve HTTP/1.1\r\n{head}\r\n".encode())
    assert int(answer.split()[1]) == status
    assert time.monotonic() - started < app.SECONDS / 2


def test_a_picture_of_the_largest_size_is_read(server):
    padded = SEVEN + b"\0" * ((5 << 20) - len(SEVEN))  # bytes behind the end of a PNG are not part of it
    assert ask(server, "POST", "/answer?size=1", padded, PNG)[0] == 200


def test_clients_that_are_slow_or_lie_about_their_length_are_sent_away(server, monkeypatch):
    monkeypatch.setattr(app, "SECONDS", 0.5)
    host = f"Host: 127.0.0.1:{server.server_port}\r\nContent-Type: image/png\r\n".encode()
    head = b"POST /curve HTTP/1.1\r\n" + host + b"Content-Length: 1000\r\n\r\n"
    assert b" 408 " in send(server, head + b"\x89PNG")
    started = time.monotonic()
    drips = [b"POST /curve HTTP/1.1\r\n", *[b"X"] * 20]
    try:
        answer = send(server, *drips, pause=0.1)
        assert answer == b"" or answer.split()[1].startswith(b"4")
    except ConnectionError:  # it was closed while we were sending
        assert time.monotonic() - started < 3
    # What comes behind a picture is not taken for a request.
    body = b"Content-Length: %d\r\n\r\n" % len(SEVEN) + SEVEN
    answer = send(server, b"POST /curve HTTP/1.1\r\n" + host + body + b"GET / HTTP/1.1\r\n\r\n")
    assert answer.count(b"HTTP/1.0 ") == 1
    assert ask(server, "GET", "/")[0] == 200


def test_a_client_that_sends_a_byte_now_and_then_is_sent_away(server, monkeypatch):
    monkeypatch.setattr(app, "SECONDS", 1.0)
    host = f"Host: 127.0.0.1:{server.server_port}\r\nContent-Type: image/png\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=300) as connection:
        connection.sendall(b"POST /curve HTTP/1.1\r\n" + host + b"Content-Length: 1000\r\n\r\n")
        connection.settimeout(0.2)
        started, answer = time.monotonic(), b""
        while not answer and time.monotonic() - started < 120:
            with contextlib.suppress(ConnectionError, TimeoutError):
                connection.sendall(b"x")
                answer = connection.recv(1000)
    assert b" 408 " in answer
    assert time.monotonic() - started > 0.5


@pytest.mark.parametrize(("size", "status"), [((5 << 20) + 1, 413), (30 << 20, 413), (1 << 20, 403)])
def test_a_client_that_sends_everything_first_learns_why_it_is_refused(server, size, status):
    headers = PNG if status == 413 else {**PNG, "Origin": "http://evil.example"}
    assert ask(server, "POST", "/curve", bytes(size), headers)[0] == status
    assert ask(server, "GET", "/")[0] == 200


def test_headers_without_end_are_refused(server):
    line = b"X-Header: " + b"a" * 100_000 + b"\r\n"
    assert b" 431 " in send(server, b"GET / HTTP/1.1\r\n" + line)
    lines = b"".join(b"X-%d: a\r\n" % i for i in range(200))
    assert b" 431 " in send(server, b"GET / HTTP/1.1\r\n" + lines + b"\r\n")


@pytest.mark.parametrize(
    "query", ["", "?size=", "?size=x", "?size=nan", "?size=inf", "?size=0", "?size=9", "?size=1&size=2"]
)
def test_a_size_out_of_range_is_named(server, query):
    status, _, content = ask(server, "POST", f"/answer{query}", SEVEN, PNG)
    assert (status, said(content)) == (400, "size must be a number from 0.25 to 4.")


def test_what_cannot_be_shown_says_why(server):
    status, _, content = ask(server, "POST", "/curve", to_bytes(Image.new("L", (280, 280))), PNG)
    assert status == 422
    assert "blank" in said(content)
    small = to_bytes(Image.new("1", (50, 50)))
    header = b"IHDR" + struct.pack(">II", 50_000, 50_000) + small[24:29]
    enormous = small[:12] + header + struct.pack(">I", zlib.crc32(header)) + small[33:]
    status, _, content = ask(server, "POST", "/curve", enormous, PNG)
    assert status == 422
    assert "64 megapixels" in said(content)
    status, _, content = ask(server, "POST", "/curve", to_bytes(Image.new("1", (4100, 4100))), PNG)
    assert status == 422
    assert "it has 4,100 x 4,100 pixels, and the limit is 16 megapixels" in said(content)
    assert ask(server, "POST", "/curve", SEVEN[:100], PNG)[0] == 422
    for method in ("PUT", "HEAD", "OPTIONS", "TRACE"):
        status, headers, _ = ask(server, method, "/curve", SEVEN, PNG)
        assert status == 501
        assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert b" 400 " in send(server, f"GET http://[/ HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode())


def test_what_fails_here_is_told_on_the_terminal_and_the_page(server, model, monkeypatch, caplog):
    monkeypatch.setattr(model, "curve", lambda picture: 1 / 0)
    status, _, content = ask(server, "POST", "/curve", SEVEN, PNG)
    assert (status, said(content)) == (500, "something went wrong: the terminal says what.")
    assert "ZeroDivisionError" in caplog.text
    assert ask(server, "POST", "/answer?size=1", SEVEN, PNG)[0] == 200


def test_a_client_that_does_not_read_is_sent_away(server, model, monkeypatch):
    monkeypatch.setattr(app, "SECONDS", 0.5)
    monkeypatch.setattr(model, "curve", lambda picture: {"picture": "x" * (32 << 20)})
    head = f"POST /curve HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\nContent-Type: image/png\r\n"
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=300) as connection:
        connection.sendall(f"{head}Content-Length: {len(SEVEN)}\r\n\r\n".encode() + SEVEN)
        deadline = time.monotonic() + 120
        while server.connections._value == app.MOST_CONNECTIONS and time.monotonic() < deadline:
            time.sleep(0.01)  # until it is accepted
        while server.connections._value < app.MOST_CONNECTIONS and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.connections._value == app.MOST_CONNECTIONS


def test_many_at_once_are_not_mixed_up(server, model):
    pictures = [to_bytes(draw_seven(side=200 + 20 * i)) for i in range(8)]
    expected = [json.loads(json.dumps(model.answer(model.read(one)[0], 1.0)))["picture"] for one in pictures]
    assert len(set(expected)) == len(pictures)

    def one(i):
        while True:
            status, _, content = ask(server, "POST", "/answer?size=1", pictures[i % 8], PNG)
            if status != 503:
                return status, json.loads(content)["picture"]
            time.sleep(0.05)

    with ThreadPoolExecutor(64) as pool:
        found = list(pool.map(one, range(64)))
    assert found == [(200, expected[i % 8]) for i in range(64)]


def test_past_the_queue_it_says_that_it_is_busy(server, monkeypatch, model):
    begun, go_on, answer = threading.Semaphore(0), threading.Event(), model.answer

    def slow(picture, size):
        begun.release()
        go_on.wait(300)
        return answer(picture, size)

    monkeypatch.setattr(model, "answer", slow)
    with ThreadPoolExecutor(app.MOST_WAITING) as pool:
        asked = [pool.submit(ask, server, "POST", "/answer?size=1", SEVEN, PNG) for _ in range(app.MOST_WAITING)]
        begun.acquire()
        deadline = time.monotonic() + 120
        status = 0
        while status != 503 and time.monotonic() < deadline:  # the others may be on their way
            if server.waiting._value:
                time.sleep(0.02)
                continue
            status, _, content = ask(server, "POST", "/answer?size=1", SEVEN, PNG)
        assert (status, said(content)) == (503, "too many pictures at once: try again.")
        assert ask(server, "GET", "/")[0] == 200  # the page itself still comes
        go_on.set()
        assert [one.result()[0] for one in asked] == [200] * app.MOST_WAITING
    assert ask(server, "POST", "/answer?size=1", SEVEN, PNG)[0] == 200


def test_connections_that_say_nothing_are_bounded(server, monkeypatch):
    monkeypatch.setattr(app, "SECONDS", 300.0)  # on a busy machine it takes long to make so many
    address, held = ("127.0.0.1", server.server_port), []
    try:
        for _ in range(app.MOST_CONNECTIONS):
            held.append(socket.create_connection(address, timeout=300))
        deadline = time.monotonic() + 120
        while server.connections._value and time.monotonic() < deadline:
            time.sleep(0.01)
        with socket.create_connection(address, timeout=300) as connection:
            assert b" 503 " in connection.recv(1000)
    finally:
        for connection in held:
            connection.close()
    deadline = time.monotonic() + 120
    while server.connections._value < app.MOST_CONNECTIONS and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ask(server, "GET", "/")[0] == 200


def test_a_port_that_is_taken_or_impossible_is_named(server, model, capsys):
    with pytest.raises(ValueError, match=f"port {server.server_port} cannot be used .*--port"):
        DemoServer(model, server.server_port)
    with pytest.raises(ValueError, match="`port` must be from 0 to 65535"):
        DemoServer(model, 70_000)
    assert cli.main(["demo", "digits", "--port", str(server.server_port), "--device", "cpu"]) == 2
    assert "choose another one with --port" in capsys.readouterr().err


def test_the_browser_is_opened_if_asked_to(model, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr(app.webbrowser, "open", opened.append)
    monkeypatch.setattr(
        DemoServer, "serve_forever", lambda self, poll_interval: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    scalesteer.app.demo.serve(model, 0)
    assert opened == []
    scalesteer.app.demo.serve(model, 0, browse=True)
    assert opened == re.findall(r"http://127\.0\.0\.1:\d+", capsys.readouterr().out)[1:]


def test_the_name_of_the_network_does_not_steer_the_terminal(model, monkeypatch, capsys):
    monkeypatch.setattr(model, "name", "digits\x1b[2J")
    monkeypatch.setattr(DemoServer, "serve_forever", lambda self, poll_interval: None)
    scalesteer.app.demo.serve(model, 0)
    assert capsys.readouterr().out.startswith("digits\ufffd[2J: http://")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_it_ends_while_a_client_is_connected_that_says_nothing(number, code):
    patient = "import sys; from scalesteer.app import cli; from scalesteer.app.demo import app; app.SECONDS = 600"
    words = ["demo", "--port", "0", "--device", "cpu"]
    command = [sys.executable, "-c", f"{patient}; sys.exit(cli.main())", *words]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # shells have what runs in the background ignore it
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heard) as process:
        try:
            port = int(re.search(r":(\d+) ", process.stdout.readline())[1])
            with socket.create_connection(("127.0.0.1", port)):
                process.send_signal(number)
                assert process.wait(300) == code
        finally:
            process.kill()
