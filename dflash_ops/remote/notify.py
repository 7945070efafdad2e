"""Tells somebody what became of a run: a webhook gets it as JSON, any other URL goes through apprise, if installed.

A process of its own, so that a dead webhook delays nothing: `python3 ops notify RUN_DIR EVENT`. URLs often are secrets:
they lie in the run's file `notify` (0600) and are shown nowhere. What went wrong stands in notify.log. Standard library
only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from dflash_ops.remote import processes, rundir

_TRIES = 3
_SECONDS = 10.0
_DEADLINE = 30.0  # for one URL, all tries
_MOST_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_LINES = 5


def main(words: list[str]) -> int:
    folder, event = Path(words[0]), words[1]
    message = describe(folder, event)
    failed: list[int] = []

    def tell_one(number: int, url: str) -> None:
        problem = send(url, message)
        note(number, problem)

    def note(number: int, problem: str) -> None:
        if problem:
            failed.append(number)
        with contextlib.suppress(OSError), open(folder / "notify.log", "a", encoding="utf-8") as log:
            log.write(f"{rundir.now()} {event}: notification {number} {problem or 'sent'}\n")

    # Side by side, so that one which hangs delays no other; daemons, since a resolver or a plug-in may hang for good.
    threads = [
        threading.Thread(target=tell_one, args=(number, url), daemon=True)
        for number, url in enumerate(urls(folder), start=1)
    ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + _DEADLINE
    for number, thread in enumerate(threads, start=1):
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            note(number, f"failed: no answer in {_DEADLINE:.0f} s")
    return 1 if failed else 0


def urls(folder: Path) -> list[str]:
    try:
        return [line for line in (folder / "notify").read_text(encoding="utf-8").split("\n") if line]
    except OSError:
        return []


def tell(folder: Path, python: str, event: str) -> None:
    """Starts the process that tells, and does not wait. event: finished, stopped, failed, stalled, restarting."""
    if not (folder / "notify").exists():
        return
    try:
        subprocess.Popen(
            [python, "-B", str(folder / "ops"), "notify", str(folder), event],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            close_fds=True,  # the GPU locks stay ours
            env={**os.environb, processes.MESSENGER: b"1"},
        ).returncode = 0  # it may outlive us: nobody waits for it here
    except OSError:
        return


def describe(folder: Path, event: str) -> dict[str, Any]:
    """The message: `text` for people (as Slack reads it; `content` is Discord's word for it), the rest for programs."""
    ended = rundir.read_exit(folder) or {}
    status = rundir.read_json(folder / "status.json") or {}
    step, total = status.get("step"), status.get("total_steps")
    at = f" at step {step}/{total}" if step is not None else ""
    why = f" (exit code {ended['code']}{', out of memory' if ended.get('oom') else ''})" if ended.get("code") else ""
    text = f"run {folder.name} on {socket.gethostname()}: {event}{at}{why}"
    last: list[str] = ended.get("last_lines") or []
    lines = last[-_LINES:] if event == "failed" else []
    return {
        "schema_version": rundir.SCHEMA_VERSION,
        "event": event,
        "run_id": folder.name,
        "name": rundir.name_of(folder.name),
        "host": socket.gethostname(),
        "code": ended.get("code"),
        "signal": ended.get("signal"),
        "step": step,
        "total_steps": total,
        "error": status.get("error"),
        "last_lines": lines,
        "time": rundir.now(),
        "text": "\n".join([text, *lines]),
        "content": "\n".join([text, *lines])[:1900],
    }


def send(url: str, message: dict[str, Any]) -> str:
    """What went wrong, without the URL, which may hold a token; empty when it was taken."""
    if not is_webhook(url):
        return _by_apprise(url, message)
    problem = ""
    for tried in range(_TRIES):
        time.sleep(tried)
        try:
            return _post(url, json.dumps(message).encode())
        except Exception as error:
            code = getattr(error, "code", None)
            why = f"HTTP {code}" if code else str(getattr(error, "reason", type(error).__name__))
            problem = f"failed: {why}"
            if code is not None and code < 500 and code != 429:
                return problem  # it will not be taken the next time either
    return problem


def _post(url: str, body: bytes) -> str:
    """Empty when it was taken; a redirect to another host is a failure that no other try would mend. Raises what
    urllib does for everything else."""
    import urllib.error  # here, since every start and every supervisor imports this file
    import urllib.parse
    import urllib.request

    class NoRedirect(urllib.request.HTTPRedirectHandler):
        """urllib would make a GET without the message of a POST, and take its answer for success."""

        def redirect_request(self, *_: Any, **__: Any) -> None:
            return None

    opener = urllib.request.build_opener(NoRedirect)
    headers = {"Content-Type": "application/json", "User-Agent": "dflash-ops"}
    host = urllib.parse.urlsplit(url).netloc
    for _ in range(_MOST_REDIRECTS + 1):
        try:
            with opener.open(urllib.request.Request(url, body, headers), timeout=_SECONDS):
                return ""
        except urllib.error.HTTPError as error:
            if error.code not in _REDIRECTS:
                raise
            url = urllib.parse.urljoin(url, error.headers.get("Location") or "")
            to = urllib.parse.urlsplit(url)
            if to.netloc != host or to.scheme not in ("http", "https"):
                return f"failed: HTTP {error.code} leads to another place; give its URL itself"
    return "failed: it leads in a circle"


def is_webhook(url: str) -> bool:
    return url.lower().startswith(("http://", "https://"))


def _by_apprise(url: str, message: dict[str, Any]) -> str:
    try:
        apprise: Any = importlib.import_module("apprise")
        sender = apprise.Apprise()
        if not sender.add(url):
            return "failed: apprise does not know such a URL"
        return "" if sender.notify(title=f"dflash-ops: {message['event']}", body=message["text"]) else "failed: apprise"
    except Exception as error:  # a plug-in's error may hold the URL: its kind has to do
        return f"failed: {type(error).__name__}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
