"""Answers by a server, a real one on loopback with its faults: told, counted, or asked again; and the key stays hid."""

import json
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.__main__ import main as command
from trainer.answering import Manner
from trainer.asked import Asked
from trainer.endpoint import Endpoint, EndpointError, Remote, endpoint_from, exchange, judged, only_model, seed_of
from trainer.regenerate import Work, main

SECRET = "sk-very-secret-4711"
Answer = Callable[["Handler", dict[str, Any]], None]


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models: list[str] = ["smollm2"]
        self.faults: list[Answer] = []
        """What the next chats are answered with, before all goes well."""
        self.always: Answer | None = None
        self.chats: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()
        self.busy = self.busiest = 0
        self.gate: threading.Event | None = None

    def server_bind(self) -> None:
        """Without HTTPServer's look for the address's name, which hangs with a name server."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.headers.append(dict(self.headers))
        if self.path == "/v1/models":
            self.say({"data": [{"id": name} for name in self.server.models]})
        else:
            self.say({"error": {"message": "no such path"}}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.chats.append(body)
            server.headers.append(dict(self.headers))
            fault = server.faults.pop(0) if server.faults else server.always
            server.busy += 1
            server.busiest = max(server.busiest, server.busy)
        if server.gate is not None:
            server.gate.wait(60)
        with server.lock:
            server.busy -= 1  # before the answer, after which its client may ask again
        if fault is not None:
            fault(self, body)
        elif self.path == "/v1/chat/completions":
            self.say(good(body))
        else:
            self.say({"error": {"message": "no such path"}}, 404)

    def say(self, found: Any, status: int = 200, **headers: str) -> None:
        self.raw(json.dumps(found).encode(), status, **headers)

    def raw(self, content: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)


def good(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """An answer that says which question it answers."""
    text = f"answer to {body['messages'][-1]['content']}, message {len(body['messages'])}"
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"choices": [{**choice, **changes}], "usage": {"completion_tokens": 12}}


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    if made.gate is not None:
        made.gate.set()
    made.shutdown()
    made.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DFLASH_ENDPOINT_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Remote.__init__, "__kwdefaults__", {"first_wait": 0.005})


def write_data(folder: Path, count: int = 20, turns: int = 1) -> Path:
    rows = [
        {"messages": [m for turn in range(turns) for m in ({"role": "user", "content": f"q{n}.{turn}"}, SAID)]}
        for n in range(count)
    ]
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


SAID = {"role": "assistant", "content": "old"}


def words(server: Server, folder: Path, *more: str) -> list[str]:
    data = folder / "data.jsonl"
    if not data.exists():
        write_data(folder)
    return ["--endpoint", server.url, "--data", str(data), "--out", str(folder / "out.jsonl"), *more]


def run(server: Server, folder: Path, *more: str) -> list[dict[str, Any]]:
    assert main(words(server, folder, *more)) == 0
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def counts(folder: Path) -> dict[str, int]:
    return json.loads((folder / "out.jsonl.origin.json").read_text())["counts"]


# --- all goes well ---


def test_every_turn_is_asked_behind_the_answers_before(server: Server, tmp_path: Path) -> None:
    write_data(tmp_path, 12, turns=3)
    more = ["--temperature", "0.7", "--top-p", "0.9", "--top-k", "30", "--max-new-tokens", "99", "--seed", "5"]
    rows = run(server, tmp_path, *more)
    assert [row["id"] for row in rows] == [f"data.jsonl-{n:06d}" for n in range(1, 13)]
    for n, row in enumerate(rows):
        texts = [(f"q{n}.{turn}", f"answer to q{n}.{turn}, message {2 * turn + 1}") for turn in range(3)]
        assert [message["content"] for message in row["messages"]] == [text for pair in texts for text in pair]
    assert len(server.chats) == 36 and counts(tmp_path)["answered"] == 36 and counts(tmp_path)["answer_tokens"] == 432
    asked = {name: server.chats[0][name] for name in ("model", "temperature", "top_p", "top_k", "max_tokens")}
    assert asked == {"model": "smollm2", "temperature": 0.7, "top_p": 0.9, "top_k": 30, "max_tokens": 99}
    assert server.chats[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert len({chat["seed"] for chat in server.chats}) == 36
    first = seed_of(5, Asked(1, "", [[{"role": "user", "content": "q0.0"}]]))
    assert first in {chat["seed"] for chat in server.chats if len(chat["messages"]) == 1} and 0 <= first < 2**31
    assert all("Authorization" not in headers for headers in server.headers)


def test_so_many_requests_at_a_time(server: Server, tmp_path: Path) -> None:
    server.gate = threading.Event()

    def open_when_full() -> None:
        while server.busy < 5:
            threading.Event().wait(0.005)
        server.gate.set()  # type: ignore[union-attr]

    opener = threading.Thread(target=open_when_full, daemon=True)
    opener.start()
    assert len(run(server, tmp_path, "--concurrency", "5")) == 20
    opener.join(20)
    assert server.busiest == 5


@pytest.mark.parametrize("name", ["DFLASH_ENDPOINT_KEY", "OPENAI_API_KEY"])
def test_the_key_is_in_the_header_and_nowhere_else(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    monkeypatch.setenv(name, f"{SECRET}\n")
    server.faults = [lambda h, _: h.say({"error": f"slow down, {SECRET}"}, 429)] * 3
    run(server, tmp_path)
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {SECRET}"}
    server.always = lambda h, _: h.say({"error": {"message": f"Incorrect key {SECRET} provided"}}, 401)
    (tmp_path / "out.jsonl").unlink()
    (tmp_path / "out.jsonl.origin.json").unlink()
    assert command(["regenerate", *words(server, tmp_path)]) == 1
    said = capsys.readouterr()
    assert "status 401: Incorrect key *** provided" in said.err
    run_again = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(SECRET in text for text in (said.out, said.err, *run_again))
    assert SECRET not in repr(endpoint_from(server.url, 9.0))


@pytest.mark.parametrize("echoed", [SECRET, f"before {SECRET} behind"])
def test_an_answer_that_holds_the_key_is_not_kept(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], echoed: str
) -> None:
    monkeypatch.setenv("DFLASH_ENDPOINT_KEY", SECRET)
    server.always = only(3, lambda h, body: h.say(good(body, message={"content": echoed})))
    assert len(run(server, tmp_path)) == 19
    said = capsys.readouterr()
    assert "1 not answered: an answer that holds the key" in said.err
    assert not any(SECRET in text for text in (*said, *(path.read_text() for path in tmp_path.iterdir())))


def test_a_model_s_name_that_holds_the_key_is_refused(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DFLASH_ENDPOINT_KEY", SECRET)
    for server.models in ([f"model-{SECRET}"], [f"model-{SECRET}", "other"]):
        assert command(["regenerate", *words(server, tmp_path)]) == 1
        said = capsys.readouterr()
        assert "holds the key (model-***" in said.err and SECRET not in said.err + said.out
    with pytest.raises(EndpointError, match=r"the model's name holds the key$"):
        run(server, tmp_path, "--model", SECRET)
    assert not list(tmp_path.glob("out*"))


# --- the time is over ---


class Late(threading.Event):
    """The time is over once this is set, where there is a limit."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    @property
    def known(self) -> bool:
        """Whether the main thread has acted on it: it looks again only after that."""
        return self.looks >= 2

    def wait_until_known(self) -> None:
        self.set()
        until = time.monotonic() + 60
        while not self.known and time.monotonic() < until:
            threading.Event().wait(0.005)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    event, elapsed, is_late = Late(), Work.elapsed, Work.late

    def look(self: Work, share: float) -> bool:
        was_set = event.is_set()
        found = is_late(self, share)
        event.looks += was_set
        return found

    monkeypatch.setattr(Work, "elapsed", lambda self: elapsed(self) + 10**6 * event.is_set())
    monkeypatch.setattr(Work, "late", look)
    return event


def test_when_the_time_is_over_no_next_turn_is_asked(server: Server, tmp_path: Path, late: Late) -> None:
    write_data(tmp_path, 12, turns=4)
    limit = ["--time-limit", "10000", "--concurrency", "2"]

    def slow(handler: Handler, body: dict[str, Any]) -> None:
        # One or both of the first two are done then, and two turns of the third are to go.
        if body["messages"][-1]["content"] in ("q2.1", "q3.0"):
            late.wait_until_known()
        handler.say(good(body))

    server.always = slow
    rows = run(server, tmp_path, *limit)
    asked: set[str] = {body["messages"][-1]["content"] for body in server.chats}
    assert "q2.2" not in asked and "q3.1" not in asked and len(asked) == len(server.chats) <= 12
    origin = json.loads((tmp_path / "out.jsonl.origin.json").read_text())
    assert origin["complete"] is False and origin["unasked"] == 12 - len(rows) and len(rows) in (2, 3, 4)
    assert origin["counts"]["unasked_turns"] >= 2 and origin["counts"]["answered"] == len(server.chats)
    server.always = None
    late.clear()
    rows = run(server, tmp_path, *limit)
    assert len(server.chats) == 48 and [len(row["messages"]) for row in rows] == [8] * 12  # none was asked twice
    assert not (tmp_path / "out.jsonl.part").exists() and counts(tmp_path)["answered"] == 48


@pytest.mark.parametrize("passing", ["hangs", "503"])
def test_when_the_time_is_over_no_further_try_is_made(
    server: Server,
    tmp_path: Path,
    late: Late,
    passing: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered, both = threading.Semaphore(0), threading.Lock()

    class Patience(threading.Timer):
        """With a request, until it is known that the time is over: the first two are answered before that."""

        def run(self) -> None:
            while not self.finished.wait(0.005):
                if late.known:
                    return self.function(*self.args)

    def fault(handler: Handler, body: dict[str, Any]) -> None:
        if body["messages"][0]["content"] in ("q0.0", "q1.0"):
            handler.say(good(body))
            answered.release()
            return
        with both:  # the first two are asked before the time is over
            if not late.is_set():
                assert answered.acquire(timeout=60) and answered.acquire(timeout=60)
        late.wait_until_known()
        if passing == "503":
            handler.say({"error": "busy"}, 503, Retry_After="30")
        else:
            handler.connection.recv(1)  # until it hangs up

    server.always = fault
    if passing == "hangs":
        monkeypatch.setattr(threading, "Timer", Patience)
    rows = run(server, tmp_path, "--time-limit", "10000", "--concurrency", "4")
    assert len(rows) == 2 and counts(tmp_path)["unanswerable"] == 0
    tries = [body["messages"][0]["content"] for body in server.chats]
    assert len(tries) == len(set(tries)) <= 6
    assert f"{20 - 2} of 20 conversations were not begun" in capsys.readouterr().out


# --- URLs and keys ---


@pytest.mark.parametrize(
    ("url", "host", "port", "path", "tls"),
    [
        ("http://box:8000", "box", 8000, "/v1", False),
        ("http://box:8000/", "box", 8000, "/v1", False),
        ("http://box/v1/", "box", 80, "/v1", False),
        ("https://box/api/v2", "box", 443, "/api/v2", True),
        ("http://[::1]:9/v1/chat/completions", "::1", 9, "/v1", False),
    ],
)
def test_a_url_names_the_server(url: str, host: str, port: int, path: str, tls: bool) -> None:
    assert endpoint_from(url, 5.0, {}) == Endpoint(host, port, path, tls, 5.0, None)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("box:8000", "is no URL such as"),
        ("ftp://box/v1", "is no URL such as"),
        ("http://", "is no URL such as"),
        ("http://box:99999", "is no URL"),
        (f"http://{SECRET}@box/v1", "takes no user, key or query"),
        (f"http://box/v1?key={SECRET}", "takes no user, key or query"),
        (f"http://user:{SECRET}/RET@host", "is no URL such as"),
        (f"http://{SECRET}/RET@host", "takes no user, key or query"),
        (f"user:{SECRET}", "is no URL such as"),
        (f"http://[{SECRET}]/v1", "is no URL such as"),
    ],
)
def test_a_wrong_url_is_told_without_its_secrets(url: str, said: str) -> None:
    with pytest.raises(EndpointError, match=said) as caught:
        endpoint_from(url, 5.0, {})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("key", [f"{SECRET}\nX-Evil: 1", f"{SECRET}é", f"{SECRET}\x00"])
def test_a_key_that_no_header_can_have_is_not_shown(key: str) -> None:
    with pytest.raises(EndpointError, match="characters that no header can have") as caught:
        endpoint_from("http://box", 5.0, {"DFLASH_ENDPOINT_KEY": key})
    assert SECRET not in str(caught.value)


def test_nobody_listens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        write_data(tmp_path)
        arguments = ["--endpoint", f"http://127.0.0.1:{port}", "--data", str(tmp_path / "data.jsonl")]
        assert command(["regenerate", *arguments, "--out", str(tmp_path / "out.jsonl")]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"EndpointError: http://127.0.0.1:{port}/v1/models: ") and "refused" in said
    assert said.count("\n") == 1 and not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("models", [[], ["one", "two"]])
def test_several_models_must_be_chosen_from(server: Server, tmp_path: Path, models: list[str]) -> None:
    server.models = models
    with pytest.raises(EndpointError, match=rf"lists {len(models)} models \({', '.join(models) or 'none'}\): name one"):
        run(server, tmp_path)
    run(server, tmp_path, "--model", "two")
    assert {chat["model"] for chat in server.chats} == {"two"}


# --- faults ---


def cut(handler: Handler, _: dict[str, Any]) -> None:
    """The server dies in the middle of an answer."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.close_connection = True


def hang_up(handler: Handler, _: dict[str, Any]) -> None:
    handler.close_connection = True


def drip(handler: Handler, _: dict[str, Any]) -> None:
    """A byte now and then, for ever."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.send_header("Connection", "close")
    handler.end_headers()
    while True:
        handler.wfile.write(b" ")
        handler.wfile.flush()
        threading.Event().wait(0.02)


def drip_headers(handler: Handler, _: dict[str, Any]) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        handler.wfile.write(b"x")
        handler.wfile.flush()
        threading.Event().wait(0.02)


PASSING: dict[str, Answer] = {
    "429": lambda h, _: h.say({"error": {"message": "slow down"}}, 429),
    "500": lambda h, _: h.raw(b"<html>oops</html>", 500),
    "503": lambda h, _: h.say({"detail": "starting"}, 503, Retry_After="0"),
    "no JSON": lambda h, _: h.raw(b'{"choices": [{'),
    "no object": lambda h, _: h.raw(b"[1]"),
    "deep": lambda h, _: h.raw(b"[" * 100_000),
    "no choices": lambda h, _: h.say({"choices": []}),
    "null choices": lambda h, _: h.say({"choices": None}),
    "an error": lambda h, _: h.say({"error": {"message": "CUDA error"}}),
    "no message": lambda h, _: h.say({"choices": [{"finish_reason": "stop"}]}),
    "cut": cut,
    "hang up": hang_up,
    "drip": drip,
    "drip of headers": drip_headers,
    "no HTTP": lambda h, _: h.wfile.write(b"SSH-2.0-x\r\n") and hang_up(h, {}),  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_what_may_pass_is_asked_again(server: Server, tmp_path: Path, fault: Answer) -> None:
    server.faults = [fault] * 3
    # Who drips is waited for that long; of the others, few at a time, none takes it on the slowest machine.
    patience = "1" if fault in (drip, drip_headers) else "60"
    rows = run(server, tmp_path, "--request-timeout", patience, "--concurrency", "4")
    assert len(rows) == 20 and len(server.chats) == 23 and counts(tmp_path)["unanswerable"] == 0


def test_a_server_that_dies_ends_the_command_and_the_next_goes_on(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.faults = [lambda h, body: h.say(good(body))] * 7
    server.always = hang_up
    assert command(["regenerate", *words(server, tmp_path, "--concurrency", "2")]) == 1
    said = capsys.readouterr().err
    assert (
        "the same command goes on" in said and "EndpointError: " in said and "no answer in 6 tries, at last: " in said
    )
    done = len((tmp_path / "out.jsonl.part").read_text().splitlines()) - 1
    assert 0 < done <= 7
    server.always = None
    before = len(server.chats)
    assert len(run(server, tmp_path)) == 20
    # Those alone that were not done; one may be asked twice, where the server was slow.
    assert len({chat["messages"][0]["content"] for chat in server.chats[before:]}) == 20 - done


@pytest.mark.parametrize(
    ("status", "said"),
    [(401, r"status 401: told: it wants another key \(set DFLASH_ENDPOINT_KEY\)"), (403, "may not do this"),
     (404, "there is nothing at this address"), (307, "a redirect, which is not followed")],
)  # fmt: skip
def test_what_no_other_request_can_mend_ends_the_command(
    server: Server, tmp_path: Path, status: int, said: str
) -> None:
    server.always = lambda h, _: h.say({"error": {"message": "told"}}, status, Location="http://127.0.0.1:1/")
    with pytest.raises(EndpointError, match=said):
        run(server, tmp_path)
    assert len(server.chats) <= 20 and not (tmp_path / "out.jsonl.part").exists()


def only(number: int, fault: Answer) -> Answer:
    """A fault for one question alone."""

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        if body["messages"][0]["content"].startswith(f"q{number}."):
            fault(handler, body)
        else:
            handler.say(good(body))

    return answer


REFUSING: dict[str, tuple[Answer, str]] = {
    "400": (lambda h, _: h.say({"message": "context length 9 is too short"}, 400), "status 400: context length 9"),
    "422": (lambda h, _: h.raw(b"no", 422), "status 422: no"),
    "poison": (lambda h, _: h.say({}, 500), "no answer in 6 tries, at last: status 500"),
    "a thought": (
        lambda h, body: h.say(good(body, message={"content": "x", "reasoning_content": "hm"})), "switch its thinking"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "reason"), REFUSING.values(), ids=REFUSING)
def test_a_request_that_is_refused_is_counted(
    server: Server, tmp_path: Path, fault: Answer, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.always = only(3, fault)
    rows = run(server, tmp_path, "--concurrency", "1")  # none is answered while this one is asked again and again
    assert len(rows) == 19 and counts(tmp_path)["unanswerable"] == 1
    said = capsys.readouterr().err
    assert said.startswith("regenerate: 1 not answered: ") and reason in said


def test_when_a_tenth_is_refused_it_ends(server: Server, tmp_path: Path) -> None:
    server.always = lambda h, _: h.say({"error": {"message": "unknown argument"}}, 400)
    with pytest.raises(ValueError, match=r"3 of 20 records can't be answered; 3 times: .*unknown argument"):
        run(server, tmp_path)


@pytest.mark.parametrize(
    ("changes", "dropped"),
    [
        ({"finish_reason": "length"}, "unfinished"),
        ({"finish_reason": "content_filter"}, "other_end"),
        ({"finish_reason": None}, "other_end"),
        ({"message": {"content": None}}, "short"),
        ({"message": {"content": "  \n"}}, "short"),
        ({"message": {"content": "\ud800"}}, "altered"),
    ],
)
def test_an_answer_that_is_not_fit_is_dropped_as_the_target_s_own(
    server: Server, tmp_path: Path, changes: dict[str, Any], dropped: str
) -> None:
    write_data(tmp_path, 6, turns=2)

    def second(handler: Handler, body: dict[str, Any]) -> None:
        bad = len(body["messages"]) == 3 or body["messages"][0]["content"] == "q0.0"
        handler.say(good(body, **changes if bad else {}))

    server.always = second
    rows = run(server, tmp_path)
    assert [len(row["messages"]) for row in rows] == [2] * 5
    assert counts(tmp_path)[dropped] == 6 and counts(tmp_path)["answered"] == 11


def test_short_answers_are_dropped_by_the_server_s_own_count(server: Server, tmp_path: Path) -> None:
    rows = run(server, tmp_path, "--min-new-tokens", "12")
    assert len(rows) == 20
    with pytest.raises(ValueError, match=r"no row for .*short 20"):
        main(
            [
                *words(server, tmp_path, "--min-new-tokens", "13")[:-4],
                "--out",
                str(tmp_path / "b.jsonl"),
                "--min-new-tokens",
                "13",
            ]
        )


def test_it_ends_while_a_request_hangs(server: Server) -> None:
    """Left by an exception, it waits for no answer."""
    server.gate = threading.Event()
    asked = [Asked(n, "", [[{"role": "user", "content": "q"}]]) for n in range(5)]
    remote = Remote(endpoint_from(server.url, 60.0), "m", Manner(), concurrency=3, refused=lambda number, why: None)

    class Ended(Exception):
        pass

    def stop() -> bool:
        if server.busy == 3:
            raise Ended
        return False

    with pytest.raises(Ended):
        list(remote.answers(asked, stop))


def test_a_body_without_end_is_cut(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.endpoint.MOST_BYTES", 1000)
    server.always = lambda h, _: h.raw(b"x" * 1001)
    with pytest.raises(Exception, match="more than 0 MiB"):
        exchange(endpoint_from(server.url, 5.0), "/chat/completions", {"messages": []})
    assert only_model(endpoint_from(server.url, 5.0)) == "smollm2"


def test_certificates_are_verified(server: Server) -> None:
    plain = endpoint_from(server.url.replace("http:", "https:"), 5.0)
    with pytest.raises(Exception, match=r"(?i)ssl|tls|wrong version|reset"):  # reset: by who did not read it all
        exchange(plain, "/models")
    assert plain.tls


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "message", "content", "finish_reason", "usage", "completion_tokens"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_no_answer_of_any_form_is_a_crash(found: Any) -> None:
    answer = found if isinstance(found, dict) else {"choices": [found]}
    try:
        text, tokens, dropped = judged(answer, 8)
    except Exception as error:
        assert type(error).__name__ in ("_Passing", "_Refused")
    else:
        assert tokens >= 0 and (dropped is not None or text.strip())
