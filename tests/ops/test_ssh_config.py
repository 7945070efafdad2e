"""The pure parts of reaching a host: what `ssh -G` says, jumps, tokens, and known_hosts held against ssh-keygen."""

import socket
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openssh import fingerprint, make_key, need, public

from dflash_ops import known_hosts, ssh_keys
from dflash_ops.errors import ConfigError
from dflash_ops.ssh_config import Here, Hop, Jump, Settings, hop, parse, parse_jumps, route

HERE = Here("/home/ann", "ann", 1000, "laptop.example.org", {"SSH_AUTH_SOCK": "/run/agent", "KEYS": "/keys"})


def hop_of(text: str, name: str = "box") -> Hop:
    return hop(name, parse(text), HERE)


# -- ssh -G

_KEY = st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=1, max_size=12)
_VALUE = st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=30)


@given(st.lists(st.tuples(_KEY, _VALUE), max_size=20))
def test_what_ssh_prints_is_read_back(pairs: list[tuple[str, str]]) -> None:
    settings = parse("".join(f"{key} {value}\n" for key, value in pairs))
    assert [(key, value) for key, values in settings.items() for value in values] == sorted(
        pairs, key=lambda pair: [key for key, _ in pairs].index(pair[0])
    )


_KEYS = st.sampled_from(
    [
        "hostname", "port", "user", "identityfile", "identityagent", "proxyjump",
        "proxycommand", "connecttimeout", "ciphers", "batchmode", "addressfamily",
        "hostkeyalias", "userknownhostsfile", "revokedhostkeys", "certificatefile", "preferredauthentications",
    ]
)  # fmt: skip
_ODD = st.sampled_from(
    ["", " ", "none", "²", "-1", "%", "%%", "${", "${}", "~", "~x/y", "a,b", "yes", "65536", "[", "\x00"]
)


@given(st.lists(st.tuples(_KEYS, _ODD | _VALUE)).map(lambda pairs: "".join(f"{key} {value}\n" for key, value in pairs)))
def test_no_text_breaks_the_reading(text: str) -> None:
    assert all(key and key == key.lower() for key in parse(text))
    try:
        assert hop("box", parse(text), HERE).name == "box"
    except ConfigError as error:
        assert error.next


def test_what_a_real_ssh_prints(tmp_path: Path) -> None:
    need("ssh")
    (tmp_path / "config").write_text(
        'Host b?x\n HostName %h.example.org\n Port 2222\n User joe\n IdentityFile ~/keys/%n-%r\n IdentityFile "/b c"\n'
        " UserKnownHostsFile /a/known /b/known\n ProxyJump ann@[::1]:33,gate\n ConnectTimeout 7\n BatchMode yes\n"
    )
    words = ("ssh", "-G", "-F", str(tmp_path / "config"), "--", "box")
    read = hop("box", parse(subprocess.run(words, check=True, capture_output=True, text=True).stdout), HERE)
    assert (read.hostname, read.port, read.user, read.connect_timeout) == ("box.example.org", 2222, "joe", 7.0)
    assert read.identities == (Path("/home/ann/keys/box-joe"), Path("/b c"))
    assert read.user_known_hosts == (Path("/a/known"), Path("/b/known"))
    assert read.jumps == (Jump("::1", "ann", 33), Jump("gate"))
    assert (read.known_as, read.known_bare) == ("[box.example.org]:2222", "box.example.org")
    assert not read.ask and read.family == socket.AF_UNSPEC


def test_nothing_said_is_what_ssh_does_by_default() -> None:
    read = hop_of("")
    assert (read.hostname, read.port, read.user, read.known_as, read.known_bare) == ("box", 22, "ann", "box", None)
    assert read.identities == tuple(Path(f"/home/ann/.ssh/id_{kind}") for kind in ("rsa", "ecdsa", "ed25519"))
    assert read.user_known_hosts[0] == Path("/home/ann/.ssh/known_hosts")
    assert read.agent == "/run/agent" and not read.jumps and read.ask


@pytest.mark.parametrize(
    ("line", "agent"),
    [
        ("identityagent none", None),
        ("identityagent SSH_AUTH_SOCK", "/run/agent"),
        ("identityagent $KEYS", "/keys"),
        ("identityagent $NOT_SET", None),
        ("identityagent ${KEYS}/agent", "/keys/agent"),
        ("identityagent ~/agent", "/home/ann/agent"),
        ("identityagent /a%b", "/a%b"),  # ssh -G has expanded tokens already
    ],
)
def test_agents(line: str, agent: str | None) -> None:
    assert hop_of(line).agent == agent


@pytest.mark.parametrize(
    ("text", "file"),
    [
        ("%d/%u", "/home/ann/ann"),
        ("/%h-%n-%p-%r-%i", "/far-box-2-joe-1000"),
        ("/%L %l %k %%h", "/laptop laptop.example.org box %h"),
        ("${KEYS}/a", "/keys/a"),
        ("~/a b", "/home/ann/a b"),
    ],
)
def test_tokens(text: str, file: str) -> None:
    read = hop_of(f"hostname far\nport 2\nuser joe\nidentityfile {text}\ncertificatefile {text}-cert.pub\n")
    assert read.identities == (Path(file),)
    assert read.certificates == (Path(f"{file}-cert.pub"),)


def test_tokens_of_a_proxy_command() -> None:
    assert hop_of("hostname far\nport 2\nproxycommand nc ${X} %h %p %n %%\n").proxy_command == "nc ${X} far 2 box %"
    with pytest.raises(ConfigError, match="%z stands for nothing"):
        hop_of("proxycommand nc %z\n")


def test_of_a_jump_and_a_proxy_command_one_is_told_by_ssh() -> None:
    assert hop_of("proxyjump a\n").proxy_command is None
    assert hop_of("proxycommand none\nproxyjump none\n").jumps == ()
    assert hop("gate", parse("proxyjump b\nproxycommand x\n"), HERE, jumped=True).jumps == ()


@pytest.mark.parametrize("name", ["UserKnownHostsFile", "GlobalKnownHostsFile"])
def test_files_with_spaces_as_ssh_prints_them(name: str) -> None:
    read = hop_of(f"{name.lower()} /a b/known /c ~/d e %d/f none")
    files = read.user_known_hosts if name.startswith("User") else read.global_known_hosts
    assert files == (Path("/a b/known"), Path("/c"), Path("/home/ann/d e"), Path("/home/ann/f"))


# -- jumps


@pytest.mark.parametrize(
    ("text", "jumps"),
    [
        ("gate", (Jump("gate"),)),
        ("a, b", (Jump("a"), Jump("b"))),
        ("joe@gate:22", (Jump("gate", "joe", 22),)),
        ("joe@corp@gate", (Jump("gate", "joe@corp"),)),
        ("[fe80::1%eth0]:2", (Jump("fe80::1%eth0", None, 2),)),
        ("::1", (Jump("::1"),)),
        ("ssh://joe@[::1]:2/", (Jump("::1", "joe", 2),)),
    ],
)
def test_jumps(text: str, jumps: tuple[Jump, ...]) -> None:
    assert parse_jumps(text, "box") == jumps


@pytest.mark.parametrize(
    "text", ["", "a,,b", "@gate", "gate:", "gate:x", "gate:0", "gate:70000", "[::1", "-oX", "a:1:b]"]
)
def test_jumps_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match="ProxyJump can't be read"):
        parse_jumps(text, "box")


def way(configs: dict[str, str]) -> list[str]:
    def ask(jump: Jump) -> Settings:
        return parse(configs.get(jump.name, ""))

    return [each.name for each in route(Jump("box"), ask, HERE)]


def test_the_way() -> None:
    """Of a,b,c the last is reached through the others whatever it says itself; the first by its own ProxyJump."""
    configs = {"box": "proxyjump a,b", "a": "proxyjump first", "b": "proxyjump elsewhere\nproxycommand x"}
    assert way(configs) == ["first", "a", "b", "box"]
    assert way({}) == ["box"]
    for circle in ({"box": "proxyjump box"}, {"box": "proxyjump a", "a": "proxyjump b", "b": "proxyjump a"}):
        with pytest.raises(ConfigError, match="goes round in a circle"):
            way(circle)
    with pytest.raises(ConfigError, match="goes round in a circle"):
        way({"box": "proxyjump " + ",".join(f"h{number}" for number in range(30))})


# -- keys


@pytest.mark.parametrize("form", ["RFC4716", "PEM", "PKCS8"])
@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_private_keys_of_every_format(tmp_path: Path, kind: str, form: str, soak: bool) -> None:
    """Locked and open ones; the public half is known of some without their passphrase."""
    need("ssh-keygen")
    if not soak and (kind, form) not in (("ed25519", "RFC4716"), ("rsa", "PEM"), ("ecdsa", "PKCS8")):
        pytest.skip("some bcrypts: with --soak")
    open_key, locked = make_key(tmp_path / "open", kind), tmp_path / "locked"
    locked.write_bytes(open_key.read_bytes())
    locked.chmod(0o600)
    for key, passphrase in ((open_key, ""), (locked, "sesame")):
        words = ("ssh-keygen", "-q", "-p", "-m", form, "-P", "", "-N", passphrase, "-f", str(key))
        subprocess.run(words, check=True, capture_output=True)
        assert ssh_keys._is_locked(key) == bool(passphrase)
    blob = ssh_keys.public_blob(open_key)
    assert ssh_keys._private(open_key, None).asbytes() == blob
    assert ssh_keys._private(locked, b"sesame").asbytes() == blob
    with pytest.raises(TypeError):
        ssh_keys._private(locked, None)
    with pytest.raises(ValueError):
        ssh_keys._private(locked, b"wrong")
    is_openssh = "OPENSSH" in locked.read_text()
    assert ssh_keys.public_blob(locked) == (blob if is_openssh else None)  # there is no locked.pub
    (tmp_path / "open.pub").unlink()
    assert ssh_keys.public_blob(open_key) == (blob if is_openssh else None)


# -- known_hosts

_NAMES = ("box", "box.example.org", "other.example.org", "[box]:2222", "10.0.0.1", "[10.0.0.1]:2222", "fe80::1")
_FIELDS = (
    "box", "BOX", "*.example.org", "b?x", "!other.example.org,*.example.org", "*,!box", "[box]:2222,10.0.0.1",
    "[*]:2222", "10.0.0.*", "[10.0.0.1]:*", "!*", "a,b,box",
)  # fmt: skip


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    need("ssh-keygen")
    folder = tmp_path_factory.mktemp("keys")
    return [make_key(folder / f"{kind}{number}", kind) for number, kind in enumerate(("ed25519", "ed25519", "ecdsa"))]


def test_names_mean_what_they_mean_to_ssh_keygen(keys: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    for field in _FIELDS:
        for hashed in (False, True):
            file.write_text(f"{field} {public(keys[0])}\n")
            if hashed:
                if set(field) & set("*?!"):
                    continue  # can't be hashed
                subprocess.run(("ssh-keygen", "-q", "-H", "-f", str(file)), check=True, capture_output=True)
            lines = known_hosts.read(file.read_text(), file)
            for name in _NAMES:
                asked = subprocess.run(("ssh-keygen", "-F", name, "-f", str(file)), capture_output=True)
                assert bool(known_hosts.of(lines, name)) == (asked.returncode == 0), (field, hashed, name)


def test_fingerprints_are_those_of_ssh_keygen(keys: list[Path]) -> None:
    for key in keys:
        (line,) = known_hosts.read(f"box {public(key)} a comment\n", key)
        assert known_hosts.fingerprint(line.blob) == fingerprint(key)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("box {a}", "known"),
        ("box {b}\nbox {a}", "known"),
        ("box {b}", "changed"),
        ("box {c}", "other"),
        ("box {c}\nbox {a}", "known"),
        ("[box]:2 {a}", "unknown"),
        ("@revoked * {a}\nbox {a}", "revoked"),
        ("@revoked * {b}\nbox {a}", "known"),
        ("@revoked other {a}\nbox {a}", "known"),
        ("@cert-authority * {a}", "authority"),
        ("@cert-authority * {b}\nbox {a}", "known"),
        ("@other box {a}", "unknown"),
        ("# box {a}\n\n  \nbox\nbox ssh-ed25519\nbox ssh-ed25519 AAAA\nbox ssh-rsa {a}", "unknown"),
        ("|1|x|y {a}\n|1| {a}\n|1|!|! {a}", "unknown"),
        ("  box\t{a}  and more", "known"),
    ],
)  # fmt: skip
def test_verdicts(keys: list[Path], text: str, word: str) -> None:
    texts = dict(zip("abc", map(public, keys), strict=True))
    lines = known_hosts.read(text.format(**texts), Path("known_hosts"))
    (shown,) = known_hosts.read(f"x {texts['a']}", Path())
    assert known_hosts.judge(lines, ["box"], shown.kind, shown.blob).word == word


_BLOB = "AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"


@given(st.text(max_size=200))
def test_no_text_breaks_known_hosts(text: str) -> None:
    lines = known_hosts.read(f"{text}\nbox {text}\n{text} ssh-ed25519 {_BLOB}", Path("f"))
    assert known_hosts.judge(lines, ["no-host"], "ssh-ed25519", b"x", bare="b").word in ("unknown", "changed")


def test_a_name_without_its_port_is_good_for_the_same_key_only(keys: list[Path]) -> None:
    """As ssh: a host on another port may be another host, whose other key is no sign of anything."""
    a, b = (known_hosts.read(f"box {public(key)}", Path("f"))[0] for key in keys[:2])
    assert known_hosts.judge([a], ["[box]:2"], a.kind, a.blob, bare="box").word == "known"
    assert known_hosts.judge([a], ["[box]:2"], b.kind, b.blob, bare="box").word == "unknown"
    revoked = known_hosts.read(f"@revoked box {public(keys[2])}", Path("f"))
    assert known_hosts.kinds([*revoked, a, b], ["box"]) == ["ssh-ed25519"]
