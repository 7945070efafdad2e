"""The programs that tests call thousands of times load little: what they import is most of what a call costs."""

import pytest
from sandbox_client import Client

HEAVY = {"contextlib", "dataclasses", "json", "pathlib", "re", "typing", "warnings"}
SIGNAL = {"collections", "enum", "functools", "signal"}  # what `signal` loads, which only a copy needs


@pytest.mark.parametrize(
    ("call", "heavy"),
    [
        ("pct list", HEAVY | SIGNAL),
        ("pct status 200", HEAVY | SIGNAL | {"ctypes"}),
        ("pct config 200", HEAVY | SIGNAL | {"ctypes"}),
        ("pct exec 200 -- true", HEAVY | SIGNAL),
        ("lxc-attach -n 200 -- true", HEAVY | SIGNAL),
        ("pct push 200 /etc/hostname /tmp/light", HEAVY),
        ("pct pull 200 /etc/hostname /tmp/light", HEAVY),
    ],
)
def test_what_is_called_often_loads_little(client: Client, call: str, heavy: set[str]) -> None:
    name, _, words = call.partition(" ")
    script = 'program=$(command -v "$1"); shift; exec $(sed -n "1s/^#!//p" "$program") -X importtime "$program" "$@"'
    answer = client.run(f"sh -c '{script}' sh {name} {words}")
    rows = [row for row in answer.err.decode().split("\n") if row.startswith("import time:")]
    loaded = {row.rpartition("|")[2].strip() for row in rows}
    assert answer.code == 0 and "encodings.utf_8" in loaded
    assert not loaded & heavy
