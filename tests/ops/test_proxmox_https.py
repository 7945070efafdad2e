"""The API over HTTPS: certificates, and servers that are slow, die, or are something else."""

import io
import json
import logging
import re
import ssl
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import urllib3
from tls_server import Answer, Identity, Server, data, drip, identity, said, serve, silent

from dflash_ops import proxmox_https
from dflash_ops.command import Api
from dflash_ops.errors import (
    ConfigError,
    HostKeyError,
    LinkLostError,
    OpsError,
    PreflightError,
    TimedOutError,
    UnreachableError,
)
from dflash_ops.proxmox_faults import NotTheApiError
from dflash_ops.proxmox_https import Https
from dflash_ops.proxmox_token import Token
from dflash_ops.proxmox_values import Call
from dflash_ops.sandbox.certificates import make_authority, make_node

SECRET = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
TOKEN = Token("bot@pve", "dflash", SECRET)
CALL = Call("get", ("nodes", "pve", "tasks", "UPID:pve:0A:bot@pve!full:", "log"), {"start": 0})


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return identity(tmp_path_factory.mktemp("tls"), "node")


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return identity(tmp_path_factory.mktemp("tls"), "other")


def pin(it: Identity) -> str:
    return proxmox_https._fingerprints(it.certificate)[0]


Asking = Callable[..., Https]


@pytest.fixture
def asking() -> Generator[Asking, None, None]:
    """Makes clients of a server, and closes them."""
    made: list[Https] = []

    def make(server: Server, seconds: float = 10.0, **keys: Any) -> Https:
        made.append(Https(Api(port=server.port, **keys), keys.pop("address", "127.0.0.1"), TOKEN, call_seconds=seconds))
        return made[-1]

    yield make
    for it in made:
        it.close()


def test_a_certificate_is_checked_by_the_nodes_ca_or_by_its_fingerprint(
    asking: Asking, node: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None of these has a say.
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/none")
    with serve([data([{"n": 1}])], node) as server:
        assert asking(server, ca=node.certificate).ask(CALL) == [{"n": 1}]
        for text in (pin(node), pin(node).lower().replace(":", ""), f"sha256 Fingerprint={pin(node)}"):
            assert asking(server, fingerprint=text).ask(CALL) == [{"n": 1}]
        both = asking(server, ca=node.certificate, fingerprint=pin(node))
        assert both.ask(CALL) == both.ask(CALL) == [{"n": 1}]
    request = server.requests[0].decode()
    assert request.startswith("GET /api2/json/nodes/pve/tasks/UPID%3Apve%3A0A%3Abot%40pve%21full%3A/log?start=0 HTTP")
    assert f"Authorization: PVEAPIToken=bot@pve!dflash={SECRET}\r\n" in request


def test_a_nodes_own_authority_is_enough_for_python_3_13_too(
    asking: Asking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for what that authority does not have; a node's certificate may also be trusted by itself."""
    made = urllib3.util.ssl_.create_urllib3_context

    def strict(*words: Any, **named: Any) -> ssl.SSLContext:
        context = made(*words, **named)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(urllib3.util.ssl_, "create_urllib3_context", strict)
    monkeypatch.setattr(urllib3.connection, "create_urllib3_context", strict)
    authority = make_authority("lab")
    certificate, key = make_node(authority, "pve")
    files = {"both": certificate + key, "node": certificate, "ca": authority.pem, "other": make_authority("lab").pem}
    for name, data_ in files.items():
        (tmp_path / name).write_bytes(data_)
    with serve([data(1)], Identity(tmp_path / "both", tmp_path / "ca")) as server:
        for name in ("ca", "node"):
            assert asking(server, ca=tmp_path / name).ask(CALL) == 1
        with pytest.raises(HostKeyError, match="did not sign it"):
            asking(server, ca=tmp_path / "other").ask(CALL)


def test_a_certificate_that_does_not_match_ends_before_the_token_is_sent(
    asking: Asking, node: Identity, other: Identity
) -> None:
    with serve([data([])], node) as server:
        for keys, words in (
            ({"fingerprint": pin(other)}, f"the inventory has {pin(other)}, it shows {pin(node)}"),
            ({"ca": other.certificate}, f"which is {pin(other)}, did not sign it; it shows {pin(node)}"),
            ({"ca": other.certificate, "fingerprint": pin(node)}, "did not sign it"),
            ({"ca": node.certificate, "fingerprint": pin(other)}, f"the inventory has {pin(other)}, it shows"),
            ({}, f"no authority that is known here signed it; it shows {pin(node)}"),
        ):
            with pytest.raises(HostKeyError, match=re.escape(words)) as caught:
                asking(server, **keys).ask(CALL)
            assert "openssl x509 -noout -fingerprint -sha256" in str(caught.value)
        assert server.requests == []


def test_a_certificate_for_another_address_or_of_another_year(asking: Asking, tmp_path: Path) -> None:
    elsewhere = identity(tmp_path, "elsewhere", address="10.1.1.1")
    expired = identity(tmp_path, "expired", days=-1)
    for it, words in ((elsewhere, "not for '127.0.0.1'"), (expired, "it has expired.*pvecm updatecerts")):
        with serve([data([])], it) as server, pytest.raises(HostKeyError, match=words):
            asking(server, ca=it.certificate).ask(CALL)


def test_a_file_of_certificates_that_can_not_be_used(asking: Asking, node: Identity, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no certificate\n")
    with serve([data([])], node) as server:
        for name in ("none", "text", ""):
            with pytest.raises(ConfigError, match=r"/etc/pve/pve-root-ca\.pem"):
                asking(server, ca=tmp_path / name).ask(CALL)


def test_an_address_with_colons(asking: Asking) -> None:
    for address in ("::1", "[::1]"):
        assert Https(Api(), address, TOKEN).asked.where == "https://[::1]:8006"
    for address in ("127.0.0.1:41129", "[::1]:41129"):
        with pytest.raises(ConfigError, match=r"holds a port .*port = 41129"):
            Https(Api(), address, TOKEN)


REFUSED: list[tuple[Answer, type[OpsError], str]] = [
    (said(b"", "401 Unauthorized"), UnreachableError, "does not know the token bot@pve!dflash"),
    (said(b'{"data":null}', "403 Permission check failed (/vms/201, VM.Audit)"), PreflightError, "lacks VM.Audit on"),
    (said(b"", "500 Gerät fehlt"), OpsError, "failed .*: Gerät fehlt"),
    (said(b"", "595 No route to host"), UnreachableError, "node pve does not answer"),
    (said(b'{"errors":{"foo":"is not defined"}}', "400 Parameter verification failed."), OpsError, "foo: is not def"),
    (said(b"<html>", "502 Bad Gateway"), UnreachableError, "something between us"),
    (said(b"<html>hello</html>"), NotTheApiError, "not the Proxmox VE API.*no JSON"),
    (said(b"[1]"), NotTheApiError, "not the Proxmox VE API"),
    (said(b'{"a":1}'), NotTheApiError, 'not the Proxmox VE API.*no "data" in it'),
    (said(b"7"), NotTheApiError, "not the Proxmox VE API"),
    (said(b"\xff\xfe"), NotTheApiError, "not the Proxmox VE API"),
    (said(b"", "302 Found", headers="Location: https://login.corp/\r\n"), NotTheApiError, "elsewhere: 'https://login.corp/'"),
    (said(b'{"data":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), NotTheApiError, "nested too deep"),
    (lambda it, _: it.sendall(b"SSH-2.0-OpenSSH_10\r\n\r\n"), LinkLostError, "broke off"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "kind", "words"), REFUSED, ids=[words[:20] for _, _, words in REFUSED])
def test_what_else_may_be_answered(
    answer: Answer, kind: type[OpsError], words: str, asking: Asking, node: Identity
) -> None:
    def once(connection: Any, stop: threading.Event) -> None:
        answer(connection, stop)
        connection.close()

    with serve([once], node) as server:
        with pytest.raises(kind, match=words) as caught:
            asking(server, ca=node.certificate).ask(CALL)
        assert type(caught.value) is kind and len(server.requests) == 1


@pytest.mark.parametrize("method", ["get", "post"])
@pytest.mark.parametrize(
    "answer",
    [
        lambda it, _: it.close(),
        said(b'{"data":[', length=100),
        lambda it, _: (it.sendall(b"HTTP/1.1 200 OK\r\nContent-"), it.close()),
        lambda it, _: (it.sendall(b'HTTP/1.1 200 OK\r\n\r\n{"data":[{"vmid"'), it.close()),
    ],
    ids=["no answer", "half an answer", "half a head", "half an answer of no length"],
)  # fmt: skip
def test_an_api_that_dies_while_it_answers(method: Any, answer: Any, asking: Asking, node: Identity) -> None:
    with serve([answer], node) as server, pytest.raises(LinkLostError, match="broke off while it answered") as caught:
        asking(server, ca=node.certificate).ask(Call(method, ("nodes",)))
    assert ("it may have happened" in str(caught.value)) == (method == "post")
    assert len(server.requests) == 1  # nothing is done twice


def test_a_kept_connection_that_was_closed_meanwhile_is_opened_anew_for_questions_alone(
    asking: Asking, node: Identity
) -> None:
    def gone(connection: Any, _: threading.Event) -> None:
        connection.close()

    with serve([data(1), gone, data(2), gone], node) as server:
        client = asking(server, ca=node.certificate)
        assert (client.ask(CALL), client.ask(CALL)) == (1, 2)
        with pytest.raises(LinkLostError, match="may have happened"):
            client.ask(Call("post", ("nodes",)))


@pytest.mark.parametrize("answer", [drip, silent], ids=["drips", "is silent"])
def test_an_api_that_is_too_slow_ends_in_an_error(answer: Answer, asking: Asking, node: Identity) -> None:
    with serve([answer, data(2)], node) as server:
        client = asking(server, ca=node.certificate, seconds=0.4)
        with pytest.raises(TimedOutError, match=r"no answer to GET /nodes/pve/.* in 0.4 s"):
            client.ask(CALL)
        client._seconds = 30.0
        assert client.ask(CALL) == 2


def test_nobody_listens_or_speaks_no_tls_or_has_no_such_name(asking: Asking, node: Identity) -> None:
    with serve([data(1)], None) as plain, pytest.raises(UnreachableError, match="does not speak TLS"):
        asking(plain, ca=node.certificate).ask(CALL)
    with serve([data(1)], node) as server:
        pass
    with pytest.raises(UnreachableError, match=f"nothing listens on port {server.port}.*pveproxy"):
        asking(server, ca=node.certificate).ask(CALL)
    client = Https(Api(port=1, ca=node.certificate), "no-such-host.invalid", TOKEN)
    with pytest.raises(UnreachableError, match=r"'no-such-host\.invalid' is not known here"):
        client.ask(CALL)
    client.close()


@pytest.mark.parametrize("package", ["proxmoxer", "requests"])
def test_a_package_that_is_missing_is_named(
    package: str, asking: Asking, node: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with serve([data(1)], node) as server, pytest.raises(PreflightError, match="pip install"):
        asking(server, ca=node.certificate).ask(CALL)


def test_the_secret_is_in_no_error_no_traceback_and_no_log(
    asking: Asking, node: Identity, other: Identity, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("proxmoxer").setLevel(logging.DEBUG)
    told = io.StringIO()
    told_us = f"PVEAPIToken=bot@pve!dflash={SECRET}"
    answers = [
        *(answer for answer, _, _ in REFUSED),
        said(told_us.encode()),
        said(json.dumps({"errors": {"x": told_us}}).encode(), "400 Wrong"),
        said(b"", f"500 {told_us.upper()}"),
        said(b"", "302 Found", headers=f"Location: https://{SECRET}/\r\n"),
        lambda it, _: it.sendall(f"{told_us}\r\n\r\n".encode()),
    ]
    for answer in [*answers, lambda it, _: it.close(), said(b"{", length=9), silent]:
        with serve([answer], node) as server:
            wrong = [{"fingerprint": pin(other)}] if answer is answers[0] else []
            for keys in ({"ca": node.certificate}, *wrong):
                try:
                    asking(server, seconds=0.5, **keys).ask(CALL)
                except OpsError as error:
                    told.write(f"{error} {error!r} {vars(error)}\n")
                    traceback.print_exception(error, file=told)
    assert told.getvalue().count("\n") > 100 and "fingerprint" in told.getvalue() and caplog.records
    for part in (SECRET, SECRET.upper(), SECRET[:13]):
        assert part not in told.getvalue() + caplog.text
    assert SECRET not in repr(Https(Api(), "x", TOKEN)) + repr(TOKEN) + str(TOKEN)


def test_urllib3_goes_on_to_warn_others(asking: Asking, node: Identity) -> None:
    import urllib3

    for name in [name for name in sys.modules if name.startswith("proxmoxer")]:
        del sys.modules[name]
    with warnings.catch_warnings(record=True) as heard, serve([data(1)], node) as server:
        warnings.simplefilter("always")
        asking(server, fingerprint=pin(node)).ask(CALL)
        assert heard == []  # a pinned certificate is checked
        warnings.warn("unchecked", urllib3.exceptions.InsecureRequestWarning, stacklevel=1)
        assert len(heard) == 1
