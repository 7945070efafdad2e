"""Conversations answered by a server of OpenAI's kind, such as vLLM or SGLang, many requests at a time.

The key comes from the environment (DFLASH_ENDPOINT_KEY, else OPENAI_API_KEY). It is in the requests' header and nowhere
else: taken out of what the server says of its errors, and an answer or a model's name that holds it is refused.
Redirects are not followed and proxies not used, since both would hand it on. Certificates are verified; http is
allowed.

What may pass (429, 5xx, a connection that breaks, no answer in time, an answer that is no JSON) is asked again, waiting
longer each time. A request that fails for good is counted with its reason when the server answers others; when it does
not, it is gone, and the command ends, to be gone on with later.
"""

import contextlib
import http.client
import json
import os
import queue
import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

from trainer.answering import Manner
from trainer.asked import Asked, Outcome
from trainer.sampling import key_of

KEYS = ("DFLASH_ENDPOINT_KEY", "OPENAI_API_KEY")
TRIES = 6
MOST_BYTES = 64 * 2**20  # of an answer
LONGEST_WAIT = 60.0  # between two tries, also where the server asks for more
FATAL = {401: "it wants another key", 403: "the key may not do this", 404: "there is nothing at this address"}


class EndpointError(ValueError):
    """The server can't be used; the text says why."""


class _Passing(Exception):
    """A failure that may pass. after: seconds that the server asked to wait."""

    def __init__(self, why: str, after: float = 0.0) -> None:
        super().__init__(why)
        self.after = after


class _Late(Exception):
    """The time is over, and this request was not answered."""


class _Refused(Exception):
    """This request can't be answered; others may."""


@dataclass(frozen=True)
class Endpoint:
    """Where the server is."""

    host: str
    port: int
    path: str
    """Before /chat/completions and /models, with the version: /v1."""
    tls: bool
    timeout: float = 600.0
    """Seconds for a whole answer, from connecting to its last byte."""
    key: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}{self.path}"


def endpoint_from(url: str, timeout: float, environment: Mapping[str, str] = os.environ) -> Endpoint:
    """The endpoint that a URL names: its base, with or without /v1, or that of its chat completions."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # its words hold parts of the URL, and so may ours not
        raise EndpointError("--endpoint is no URL such as http://127.0.0.1:8000/v1") from None
    if "@" in url or parts.query or parts.fragment:
        raise EndpointError(f"--endpoint takes no user, key or query in its URL: the key belongs into {KEYS[0]}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise EndpointError("--endpoint is no URL such as http://127.0.0.1:8000/v1")
    tls = parts.scheme == "https"
    path = parts.path.rstrip("/").removesuffix("/chat/completions").rstrip("/")
    key = next((found for name in KEYS if (found := environment.get(name, "").strip())), None)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise EndpointError(f"the key in {' or '.join(KEYS)} has characters that no header can have")
    return Endpoint(parts.hostname, port or (443 if tls else 80), path or "/v1", tls, timeout, key)


# --- one request ---


def exchange(endpoint: Endpoint, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object that the server answers with. Raises EndpointError, _Passing, _Refused."""
    headers = {"Accept": "application/json", "User-Agent": "dflash-trainer"}
    if endpoint.key is not None:
        headers["Authorization"] = f"Bearer {endpoint.key}"
    content = None
    if body is not None:
        headers["Content-Type"] = "application/json"
        content = json.dumps(body).encode()
    connection = (
        http.client.HTTPSConnection(
            endpoint.host, endpoint.port, timeout=endpoint.timeout, context=ssl.create_default_context()
        )
        if endpoint.tls
        else http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=endpoint.timeout)
    )
    late, held = threading.Event(), list[socket.socket]()
    watch = threading.Timer(endpoint.timeout, _cut, (connection, held, late))
    watch.daemon = True
    watch.start()
    try:
        connection.connect()
        held.append(cast("socket.socket", connection.sock))
        if late.is_set():
            raise TimeoutError
        connection.request("POST" if body is not None else "GET", endpoint.path + path, content, headers)
        response = connection.getresponse()
        said = response.read(MOST_BYTES + 1)
        status, after = response.status, response.headers.get("Retry-After", "")
        if late.is_set():
            raise TimeoutError
        if len(said) <= MOST_BYTES and response.length:
            raise http.client.IncompleteRead(b"")
    except ssl.SSLCertVerificationError as error:
        raise EndpointError(f"{endpoint.name}: its certificate is not trusted: {error.verify_message}") from None
    except (OSError, http.client.HTTPException) as error:
        if late.is_set() or isinstance(error, TimeoutError):
            raise _Passing(f"no whole answer in {endpoint.timeout:g} s") from None
        raise _Passing(_told(endpoint, error)) from None
    finally:
        watch.cancel()
        connection.close()
    if len(said) > MOST_BYTES:
        raise _Refused(f"an answer of more than {MOST_BYTES // 2**20} MiB")
    if status != 200:
        raise _fault(endpoint, path, status, after, said)
    try:
        found = json.loads(said)
    except (ValueError, RecursionError):
        raise _Passing("an answer that is no JSON") from None
    if not isinstance(found, dict):
        raise _Passing("an answer that is no JSON object")
    return cast("dict[str, Any]", found)


def _cut(connection: http.client.HTTPConnection, held: Sequence[socket.socket], late: threading.Event) -> None:
    """Ends a request that takes too long, however it spends its time: a slow drip beats any timeout of a read."""
    late.set()
    for sock in (*held, connection.sock):  # the connection lets go of it while the answer is read
        with contextlib.suppress(OSError):
            if sock is not None:
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not TLS's own: it would wait for an answer


def _told(endpoint: Endpoint, error: Exception) -> str:
    words = str(error).strip() or type(error).__name__
    if isinstance(error, http.client.IncompleteRead):
        words = "the connection ended in the middle of an answer"
    return _scrubbed(endpoint, words)


def _scrubbed(endpoint: Endpoint, words: str) -> str:
    """Without the key, in one line, not too long."""
    if endpoint.key:
        words = words.replace(endpoint.key, "***")
    words = " ".join(words.split())
    return words if len(words) <= 300 else f"{words[:297]}..."


def _fault(endpoint: Endpoint, path: str, status: int, after: str, said: bytes) -> Exception:
    """What a status other than 200 means."""
    words = _scrubbed(endpoint, _message(said))
    text = f"status {status}" + f": {words}" * bool(words)
    if status in FATAL:
        hint = f" (set {KEYS[0]})" if status == 401 else ""
        return EndpointError(f"{endpoint.name}{path}: {text}: {FATAL[status]}{hint}")
    if 300 <= status < 400:
        return EndpointError(f"{endpoint.name}{path}: {text}: a redirect, which is not followed: name its address")
    if status in (408, 425, 429) or status >= 500:
        return _Passing(text, float(after) if after.strip().isdecimal() else 0.0)
    return _Refused(f"the server refuses it, {text}")


def _message(said: bytes) -> str:
    """What a server says of its error: {"error": {"message"}}, {"message"}, {"detail"}, or a plain text."""
    text = said[:4096].decode("utf-8", "replace")
    try:
        found: Any = json.loads(said)
    except (ValueError, RecursionError):
        return "" if "<html" in text.lower() else text
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and name in found:
            found = cast("dict[str, Any]", found)[name]
    return found if isinstance(found, str) else json.dumps(found)


def only_model(endpoint: Endpoint) -> str:
    """The one model that the server has. Raises EndpointError: it can't be reached, or has several."""
    try:
        found = exchange(endpoint, "/models")
    except (_Passing, _Refused) as error:
        raise EndpointError(f"{endpoint.name}/models: {error}") from None
    listed: Any = found.get("data")
    ones = cast("list[Any]", listed) if isinstance(listed, list) else []
    ids = [cast("dict[str, Any]", one).get("id") for one in ones if isinstance(one, dict)]
    names = sorted({_scrubbed(endpoint, one) for one in ids if isinstance(one, str)})
    if endpoint.key and any(isinstance(one, str) and endpoint.key in one for one in ids):
        raise EndpointError(f"{endpoint.name} lists a model whose name holds the key ({', '.join(names[:8])})")
    if len(names) != 1:
        shown = ", ".join(names[:8]) or "none"
        raise EndpointError(f"{endpoint.name} lists {len(names)} models ({shown}): name one with --model")
    return names[0]


# --- many ---


@dataclass(frozen=True)
class _Failed:
    """A conversation that could not be answered, for a reason of the server's."""

    asked: Asked
    why: str


class Remote:
    """Answers by a server."""

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        manner: Manner,
        *,
        concurrency: int,
        refused: Callable[[int, str], None],
        first_wait: float = 1.0,
    ) -> None:
        """refused: is told of each conversation, by its number, that the server can't answer, and why; it may raise."""
        self._endpoint, self._model, self._manner = endpoint, model, manner
        self._concurrency, self._refused, self._first_wait = concurrency, refused, first_wait
        self._successes = 0
        self._late = threading.Event()
        """No further turn is asked, and none once more."""
        self._ended = threading.Event()
        if endpoint.key and endpoint.key in model:
            raise EndpointError("the model's name holds the key")

    def answers(self, conversations: Iterable[Asked], stop: Callable[[], bool]) -> Iterator[Outcome]:
        """Each conversation's outcome, in the order of finishing. Raises EndpointError when the server is gone.

        Stopped, no further turn is begun and none asked again: conversations with answers end as they are, and the
        others have no outcome. Left by an exception, requests under way are left behind.
        """
        waiting = iter(conversations)
        todo: queue.Queue[Asked | None] = queue.Queue()
        done: queue.Queue[Outcome | _Failed | BaseException | None] = queue.Queue()
        self._ended.clear()
        self._late.clear()
        workers = [
            threading.Thread(target=self._work, args=(todo, done), daemon=True, name=f"request-{number}")
            for number in range(self._concurrency)
        ]
        under_way, more = 0, True
        try:
            for worker in workers:
                worker.start()
            while more or under_way:
                if stop():
                    more = False
                    self._late.set()
                while more and under_way < self._concurrency:
                    asked = next(waiting, None)
                    more = asked is not None
                    if asked is not None:
                        under_way += 1
                        todo.put(asked)
                if not under_way:
                    return
                try:
                    found = done.get(timeout=0.2)
                except queue.Empty:
                    continue
                under_way -= 1
                if isinstance(found, BaseException):
                    raise found
                if isinstance(found, _Failed):
                    if found.asked.answers:
                        yield found.asked.outcome("refused")
                    else:
                        self._refused(found.asked.number, found.why)
                elif found is not None:
                    yield found
        finally:
            self._ended.set()
            self._late.set()
            for _ in workers:
                todo.put(None)

    def _work(
        self, todo: "queue.Queue[Asked | None]", done: "queue.Queue[Outcome | _Failed | BaseException | None]"
    ) -> None:
        while (asked := todo.get()) is not None and not self._ended.is_set():
            try:
                done.put(self._answered(asked))
            except _Late:
                done.put(asked.cut())
            except _Refused as error:
                done.put(_Failed(asked, str(error)))
            except Exception as error:  # for the main thread, which ends the command
                done.put(error)

    def _answered(self, asked: Asked) -> Outcome:
        """All turns of a conversation."""
        while True:
            text, tokens, dropped = self._insisted(asked)
            asked.tokens += tokens
            if dropped:
                return asked.outcome(dropped)
            if not asked.keep(text):
                return asked.outcome()

    def _insisted(self, asked: Asked) -> tuple[str, int, str | None]:
        """The next answer, asked for again and again. Raises EndpointError, _Refused, _Late."""
        body = self._body(asked)
        before = self._successes
        for tried in range(1, TRIES + 1):
            if self._late.is_set():
                raise _Late
            try:
                found = judged(exchange(self._endpoint, "/chat/completions", body), self._manner.least)
                if self._endpoint.key and self._endpoint.key in found[0]:
                    raise _Refused("an answer that holds the key")
                self._successes += 1
                return found
            except _Refused:
                self._successes += 1  # the server is there
                raise
            except _Passing as error:
                if self._late.is_set():
                    raise _Late from None
                if tried == TRIES:
                    why = f"no answer in {TRIES} tries, at last: {error}"
                    if self._successes > before or self._answers_anything():
                        raise _Refused(why) from None
                    raise EndpointError(f"{self._endpoint.name}: {why}") from None
                wait = max(error.after, self._first_wait * 2 ** (tried - 1) * random.uniform(0.75, 1.25))
                if self._late.wait(min(wait, LONGEST_WAIT)):
                    raise _Late from None
        raise AssertionError

    def _answers_anything(self) -> bool:
        """Whether the server is there, and it is this one conversation that it can't answer."""
        body = {"model": self._model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        try:
            return bool(exchange(self._endpoint, "/chat/completions", body).get("choices"))
        except (_Passing, _Refused):
            return False

    def _body(self, asked: Asked) -> dict[str, Any]:
        manner = self._manner
        body: dict[str, Any] = {
            "model": self._model,
            "messages": asked.said,
            "temperature": manner.temperature,
            "top_p": manner.top_p,
            "max_tokens": manner.limit,
            "seed": seed_of(manner.seed, asked),
            "chat_template_kwargs": {"enable_thinking": False},  # as chat.py asks the template
        }
        return body if manner.top_k is None else {**body, "top_k": manner.top_k}


def seed_of(seed: int, asked: Asked) -> int:
    """What the server is to draw an answer with: of the same as the target's own draws, in 31 bits."""
    return key_of("answer", seed, asked.number, asked.answers) & 0x7FFFFFFF


def judged(found: Mapping[str, Any], least: int) -> tuple[str, int, str | None]:
    """An answer's text, its tokens as the server counts them, and why it is dropped. Raises _Passing, _Refused."""
    choices = found.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise _Passing("an answer without choices")
    choice = cast("dict[str, Any]", choices[0])
    message, reason = choice.get("message"), choice.get("finish_reason")
    if not isinstance(message, dict):
        raise _Passing("an answer without a message")
    message = cast("dict[str, Any]", message)
    usage = found.get("usage")
    counted: Any = cast("dict[str, Any]", usage).get("completion_tokens") if isinstance(usage, dict) else None
    tokens = counted if isinstance(counted, int) and not isinstance(counted, bool) and counted >= 0 else None
    if reason == "length":
        return "", tokens or 0, "unfinished"
    if message.get("reasoning_content") or message.get("reasoning"):
        raise _Refused("the server answers with a thought of its own: switch its thinking off")
    text = message.get("content")
    if reason != "stop":
        return "", tokens or 0, "other_end"
    if not isinstance(text, str) or not text.strip() or (tokens is not None and tokens < least):
        return "", tokens or 0, "short"
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        return "", tokens or 0, "altered"
    return text, tokens or 0, None
