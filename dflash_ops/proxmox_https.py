"""The API over HTTPS, through proxmoxer and requests; every foreign error becomes one of ours here.

The certificate is checked against a file of certificates (the node's own CA), or by its fingerprint, or as browsers do;
it is never left unchecked, and before it is checked nothing is sent. A proxy of the environment is not used: ssh to the
same machine goes through none either.
"""

# proxmoxer carries no types: what comes from it is unknown to the checker.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import hashlib
import re
import ssl
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from pathlib import Path
from typing import Any
from urllib.parse import quote

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
from dflash_ops.proxmox_faults import Asked, not_the_api, refused
from dflash_ops.proxmox_token import Token
from dflash_ops.proxmox_values import Call

CALL_SECONDS = 30.0
_CONNECT_SECONDS = 10.0


class Https:
    """One node's API. call_seconds: what one question may take, from the name's look-up to the answer's last byte."""

    def __init__(self, api: Api, address: str, token: Token, *, call_seconds: float = CALL_SECONDS) -> None:
        address = _bare(address)
        self.asked = Asked(f"https://{f'[{address}]' if ':' in address else address}:{api.port}", token.id)
        self._api, self._address, self._token, self._seconds = api, address, token, call_seconds
        if api.ca is not None:
            _check_certificates(api.ca)
        self._client: Any = None

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            _session(client).close()

    def ask(self, call: Call) -> Any:
        """The answer's data."""
        before = self._client
        try:
            return self._ask(call)
        except LinkLostError:
            # A connection that was kept may have been closed at the moment that we used it again.
            if call.method != "get" or before is None:
                raise
            self.close()
            return self._ask(call)

    def _ask(self, call: Call) -> Any:
        coming: Future[Any] = Future()
        if self._client is None:
            self._client = _client(self._api, self._address, self._token, self._seconds)
        client = self._client
        import requests  # that it is there, `_client` has seen

        def asking() -> None:
            try:
                coming.set_result(_ask(client, call))
            except BaseException as error:
                coming.set_exception(error)

        # requests bounds the wait for each part of an answer, not for all of them, and no look-up of a name.
        threading.Thread(target=asking, name=str(call), daemon=True).start()
        try:
            return self._read(call, coming.result(self._seconds))
        except (requests.exceptions.Timeout, NoAnswer) as error:
            self._client = None  # that thread still has it
            if isinstance(error, requests.exceptions.ConnectTimeout):
                why = f"no connection within {_CONNECT_SECONDS:g} s: a firewall, or the wrong address"
                raise self._unreachable(why) from error
            raise self._too_slow(call) from error
        except requests.exceptions.RequestException as error:
            # A line that is no HTTP may be anything, also our own header; a traceback shows causes.
            told = any(self._token.secret in str(cause) for cause in _causes(error))
            raise self._foreign(call, error) from (None if told else error)
        except _resource_exception() as error:
            raise refused(self.asked, call, error.status_code, _utf8(error.content), error.errors) from error

    def _read(self, call: Call, answer: Any) -> Any:
        # What proxmoxer makes of an answer that is no JSON.
        if not (isinstance(answer, dict) and set(answer) == {"errors"} and isinstance(answer["errors"], bytes)):
            return answer
        text = answer["errors"]
        if not text or text.startswith(b'{"'):  # it began as the API's do
            raise self._broke_off(call)
        raise not_the_api(self.asked, call, f"no JSON, but {text[:60]!r}")

    def _broke_off(self, call: Call) -> LinkLostError:
        changes = "; it may have happened" if call.method != "get" else ""
        return LinkLostError(
            f"the API broke off while it answered {call}",
            where=self.asked.where,
            why=f"the connection was closed{changes}",
            next="on the host: systemctl status pveproxy; journalctl -u pveproxy -n 20",
        )

    def _too_slow(self, call: Call) -> TimedOutError:
        changes = "; it may have happened" if call.method != "get" else ""
        return TimedOutError(
            f"no answer to {call} in {self._seconds:g} s",
            where=self.asked.where,
            why=f"the API is slow, or its node is{changes}",
            next="on the host: systemctl status pveproxy pvedaemon pvestatd",
        )

    def _unreachable(self, why: str, next: str = "") -> UnreachableError:
        return UnreachableError(
            "the API is not reachable",
            where=self.asked.where,
            why=why,
            next=next or "correct `address` and `port` of the host's [api], or remove it: pvesh over ssh is asked then",
        )

    def _foreign(self, call: Call, error: Exception) -> OpsError:
        """What requests says, as one of our errors."""
        import requests
        import urllib3

        causes = list(_causes(error))
        text = " ".join(str(cause) for cause in causes)
        if isinstance(error, requests.exceptions.SSLError):
            return self._not_trusted(text)
        if isinstance(error, requests.exceptions.TooManyRedirects):
            target = error.response.headers.get("Location", "") if error.response is not None else ""
            return not_the_api(self.asked, call, f"it sends us elsewhere: {target[:200]!r}")
        if any(isinstance(cause, urllib3.exceptions.ReadTimeoutError) for cause in causes):
            self._client = None
            return self._too_slow(call)
        if any(isinstance(cause, urllib3.exceptions.NameResolutionError) for cause in causes):
            return self._unreachable(f"the name {self._address!r} is not known here")
        if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
            advice = "on the host: systemctl status pveproxy; or correct `port` (8006) of the host's [api]"
            return self._unreachable(f"nothing listens on port {self._api.port}", advice)
        broken = (requests.exceptions.ChunkedEncodingError, requests.exceptions.ContentDecodingError)
        if isinstance(error, broken) or any(isinstance(it, urllib3.exceptions.ProtocolError) for it in causes):
            return self._broke_off(call)
        system = next((cause for cause in causes if isinstance(cause, OSError) and cause.strerror), None)
        return self._unreachable(str(system.strerror) if system else type(error).__name__)

    def _not_trusted(self, text: str) -> OpsError:
        if any(
            word in text for word in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "HTTP request")
        ):
            return self._unreachable(f"what listens on port {self._api.port} does not speak TLS")
        shown = _shown_certificate(self._address, self._api.port)
        if shown is None and "certificate" not in text.lower() and "fingerprint" not in text.lower():
            return self._unreachable("TLS was broken off")
        got = f"it shows {shown}" if shown else "it shows none any more"
        advice = (
            f"compare, on the host: openssl s_client -connect localhost:{self._api.port} </dev/null | "
            "openssl x509 -noout -fingerprint -sha256; if it is right, correct {} of the host's [api] in the inventory"
        )
        either = "`ca` or `fingerprint`"
        said = found[1] if (found := re.search(r"certificate verify failed: ([^(]+?) \(", text)) else ""
        if "expired" in text or "not yet valid" in text:
            why = f"it has expired, or a clock is wrong; {got}"
            advice = "compare the clocks; a new certificate, on the host: pvecm updatecerts --force, or renew your own"
        elif self._api.fingerprint is not None and "ingerprint" in text:
            why, advice = f"the inventory has {self._api.fingerprint}, {got}", advice.format("`fingerprint`")
        elif "ostname mismatch" in text or "doesn't match" in text or "IP address mismatch" in text:
            why = f"the certificate is not for {self._address!r}; {got}"
            advice = advice.format("`address` (a name it is for)")
        elif said and not any(word in said for word in ("issuer", "self-signed", "self signed", "signature")):
            why, advice = f"{said}; {got}", advice.format(either)
        elif self._api.ca is not None:
            theirs = " or ".join(_fingerprints(self._api.ca)) or "nothing"
            why = f"{self._api.ca}, which is {theirs}, did not sign it; {got}"
            advice = f"{advice.format(either)}; where the node has a certificate of its own, leave both out"
        else:
            why, advice = f"no authority that is known here signed it; {got}", advice.format(either)
        return HostKeyError(
            "the API's certificate is not the expected one", where=self.asked.where, why=why, next=advice
        )


def _client(api: Api, address: str, token: Token, seconds: float) -> Any:
    """proxmoxer with a session of our own habits. Nothing is sent yet."""
    try:
        import requests  # noqa: F401  # pyright: ignore[reportUnusedImport] (proxmoxer ends the process without it)

        with warnings.catch_warnings():  # it switches urllib3's warnings off for the whole process
            from proxmoxer import ProxmoxAPI
            from proxmoxer.backends import https as _  # noqa: F401
    except ImportError as error:
        raise PreflightError(
            "a Python package is missing here", why=str(error), next="pip install 'proxmoxer>=2.2' requests"
        ) from error
    from requests.adapters import HTTPAdapter
    from urllib3.util.ssl_ import create_urllib3_context

    # With a fingerprint and no CA the chain is not checked, the fingerprint is: before anything is sent.
    pinned_alone = api.fingerprint is not None and api.ca is None
    context = create_urllib3_context(cert_reqs=ssl.CERT_NONE if pinned_alone else ssl.CERT_REQUIRED)
    # The CA that a node makes itself has no "key usage", which Python 3.13 began to ask for. That file may also hold
    # the node's certificate alone: then it is that one which is trusted.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN

    class Checked(HTTPAdapter):
        """Checks the chain as above, or the one certificate with the inventory's fingerprint."""

        def init_poolmanager(self, *words: Any, **named: Any) -> None:
            pin = _pin(api.fingerprint) if api.fingerprint is not None else None
            super().init_poolmanager(*words, **named, ssl_context=context, assert_fingerprint=pin)

    client = ProxmoxAPI(
        address,
        port=api.port,
        user=token.user,
        token_name=token.name,
        token_value=token.secret,
        verify_ssl=str(api.ca) if api.ca is not None else not pinned_alone,
        timeout=(min(_CONNECT_SECONDS, seconds), seconds),
    )
    session = _session(client)
    session.trust_env = False  # proxies, CA bundles and .netrc of the environment
    session.max_redirects = 0
    session.mount("https://", Checked())
    session.hooks["response"].append(_hider(token.secret))
    return client


def _hider(secret: str) -> Callable[..., None]:
    """A hook that takes our secret out of an answer, before anybody reads it: debug pages show what they were asked."""
    pattern = re.compile(re.escape(secret), re.IGNORECASE)

    def hide(answer: Any, **_: Any) -> None:
        content = answer.content
        if secret.lower().encode() in content.lower():
            answer._content = re.sub(pattern.pattern.encode(), b"(the secret)", content, flags=re.IGNORECASE)
        answer.reason = pattern.sub("(the secret)", answer.reason or "")
        for name, value in list(answer.headers.items()):
            answer.headers[name] = pattern.sub("(the secret)", value)

    return hide


def _pin(text: str) -> str:
    """A fingerprint as urllib3 takes it, also where it is openssl's whole line."""
    return text.rpartition("=")[2].replace(":", "").strip()


def _bare(address: str) -> str:
    """An address without brackets. ConfigError when it has a port: that is another key."""
    bare = address.removeprefix("[").removesuffix("]")
    if re.fullmatch(r"[^:]*:\d+|\[.*\]:\d+", address) or bare.count(":") == 1:
        raise ConfigError(
            "the API's address holds a port",
            where=address,
            next=f"in the host's [api]: address without it, and port = {address.rpartition(':')[2]}",
        )
    return bare


def _session(client: Any) -> Any:
    return client._store["session"]  # it has no other name for it


def _ask(client: Any, call: Call) -> Any:
    resource = client([quote(word, safe="") for word in call.path])
    try:
        return getattr(resource, call.method)(**call.parameters)
    except RecursionError:
        return {"errors": b"JSON that is nested too deep"}
    except (KeyError, TypeError, AttributeError) as error:  # JSON, but no object with "data"
        return {"errors": f'no "data" in it ({type(error).__name__})'.encode()}


def _utf8(reason: Any) -> str:
    """A reason phrase, which Python reads as latin-1 and Proxmox VE writes as UTF-8."""
    text = str(reason or "")
    try:
        return text.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return text


def _resource_exception() -> Any:
    from proxmoxer.core import ResourceException

    return ResourceException


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and all that it was made of."""
    seen: set[int] = set()
    waiting: list[Any] = [error]
    while waiting:
        it = waiting.pop(0)
        if not isinstance(it, BaseException) or id(it) in seen:
            continue
        seen.add(id(it))
        yield it
        waiting += [*it.args, getattr(it, "reason", None), it.__cause__, it.__context__]


def _check_certificates(file: Path) -> None:
    """ConfigError when a file holds no certificates."""
    try:
        ssl.create_default_context(cafile=str(file))
    except (OSError, ValueError) as error:  # ssl's errors are OSErrors
        raise ConfigError(
            "the file of the API's certificates can't be used",
            where=str(file),
            why=(error.strerror or str(error)) if isinstance(error, OSError) else str(error),
            next="fetch it anew from the host: /etc/pve/pve-root-ca.pem",
        ) from error


def _shown_certificate(address: str, port: int) -> str | None:
    """The fingerprint of the certificate that is shown there, for an error: nothing else is said or heard."""
    try:
        text = ssl.get_server_certificate((address, port), timeout=_CONNECT_SECONDS)
        return fingerprint(ssl.PEM_cert_to_DER_cert(text))
    except (OSError, ValueError):
        return None


def _fingerprints(file: Path) -> list[str]:
    """Of the certificates in a file."""
    try:
        text = file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    end = "-----END CERTIFICATE-----"
    found = [part[part.index("-----BEGIN") :] + end for part in text.split(end) if "-----BEGIN CERTIFICATE" in part]
    return [fingerprint(ssl.PEM_cert_to_DER_cert(part)) for part in found]


def fingerprint(der: bytes) -> str:
    """SHA-256 of a certificate as Proxmox VE writes it: "AA:BB:..."."""
    digest = hashlib.sha256(der).hexdigest().upper()
    return ":".join(digest[at : at + 2] for at in range(0, len(digest), 2))
