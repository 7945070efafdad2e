"""The rows of the SSH matrix. A configuration's lines are set apart by `; ` and begin under `Host *`; `Host box` with
the target's address, and the gates', come behind them (ssh_world.USUAL): the rows' own values win."""

from dataclasses import dataclass

from dflash_ops.errors import ConfigError, HostKeyError, OpsError, UnreachableError


@dataclass(frozen=True)
class Row:
    """A configuration that lets us in. way: connections that it makes to the target, the gate, the outer gate; agent:
    the keys that an agent at $SSH_AUTH_SOCK and $MY_AGENT holds."""

    name: str
    config: str
    host: str = "box"
    user: str = "root"
    way: tuple[int, int, int] = (1, 0, 0)
    agent: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """A configuration that must not let us in. says: parts of the error, with ` ... ` between them; {...} as in
    configurations, and the fingerprints {stranger} and {shown} (the target's ed25519 key)."""

    name: str
    config: str
    error: type[OpsError]
    says: str
    host: str = "box"
    agent: tuple[str, ...] = ()


CROWD = tuple(f"crowd{number}" for number in range(7))  # more keys than sshd lets anybody try
IN = [
    Row("alias", ""),
    Row("user-by-config", "Host box; User joe", user="joe"),
    Row("user-in-the-address", "", host="joe@box", user="joe"),
    Row("match-host", "Match host 127.0.0.1; User joe"),
    Row("match-originalhost", "Match originalhost box; User joe", user="joe"),
    Row("match-exec", 'Match originalhost box exec "test %n = box"; User joe', user="joe"),
    Row("match-exec-that-says-no", 'Match exec "false"; User joe'),
    Row("match-final", "Match final host 127.0.0.1; HostKeyAlias the-box; Host *; UserKnownHostsFile {dir}/aliased"),
    Row("include", "Include {dir}/conf.d/one.conf", host="included"),
    Row("include-glob", "Include {dir}/conf.d/*.conf", host="included"),
    Row(
        "canonical-name",
        "CanonicalizeHostname always; Match canonical host localhost; "
        "HostKeyAlias the-box; Port {target}; Host *; AddressFamily inet; UserKnownHostsFile {dir}/aliased",
        host="localhost",
    ),
    Row("jump", "Host box; ProxyJump gate", way=(1, 1, 0)),
    Row("two-jumps", "Host box; ProxyJump outer,gate", way=(1, 1, 1)),
    Row("a-jump-with-a-jump", "Host box; ProxyJump gate; Host gate; ProxyJump outer", way=(1, 1, 1)),
    Row("jump-in-full", "Host box; ProxyJump joe@127.0.0.1:{gate}", way=(1, 1, 0)),
    Row("jump-as-a-uri", "Host box; ProxyJump ssh://joe@127.0.0.1:{gate}", way=(1, 1, 0)),
    Row("jump-switched-off", "Host box; ProxyJump none; Host *; ProxyJump gate"),
    Row(
        "jump-by-a-proxy-command",
        "Host box; ProxyJump gate; Host gate; ProxyCommand {python} {dir}/relay.py %h %p {dir}/log",
        way=(1, 1, 0),
    ),
    Row("proxy-command", "Host box; ProxyCommand {python} {dir}/relay.py %h %p {dir}/log %n %r %%"),
    Row("proxy-command-with-a-shell", "Host box; ProxyCommand {python} {dir}/relay.py %h $((%p)) '{dir}/log' 2>&1"),
    Row("proxy-command-of-ssh", "Host box; ProxyCommand ssh -F {dir}/config -W %h:%p gate", way=(1, 1, 0)),
    Row("proxy-command-switched-off", "Host box; ProxyCommand none; Host *; ProxyCommand false"),
    Row("agent-only", "IdentityAgent SSH_AUTH_SOCK; IdentityFile none", agent=("id",)),
    Row("agent-by-variable", "IdentityAgent $MY_AGENT; IdentityFile none", agent=("id",)),
    Row("agent-by-path", "IdentityAgent ${{MY_AGENT}}; IdentityFile none", agent=("id",)),
    Row("locked-key-in-the-agent", "IdentityAgent SSH_AUTH_SOCK; IdentityFile {dir}/locked", agent=("locked",)),
    Row(
        "public-half-alone",
        "IdentityAgent SSH_AUTH_SOCK; IdentitiesOnly yes; IdentityFile {dir}/id-public",
        agent=(*CROWD, "id"),
    ),
    Row("crowded-agent-key-named", "IdentityAgent SSH_AUTH_SOCK", agent=(*CROWD, "id")),
    Row("crowded-agent-identities-only", "IdentityAgent SSH_AUTH_SOCK; IdentitiesOnly yes", agent=CROWD),
    Row("certificate-beside-the-key", "IdentityFile {dir}/signed"),
    Row("certificate-file", "IdentityFile {dir}/bare/signed; CertificateFile {dir}/moved-cert"),
    Row(
        "certificate-of-a-key-in-the-agent",
        "IdentityAgent SSH_AUTH_SOCK; IdentitiesOnly yes; IdentityFile {dir}/signed-public; "
        "CertificateFile {dir}/moved-cert",
        agent=("bare/signed",),
    ),
    Row("certificate-in-the-agent", "IdentityAgent SSH_AUTH_SOCK; IdentityFile none", agent=("signed",)),
    Row("ecdsa-key", "IdentityFile {dir}/ecdsa"),
    Row("rsa-key", "IdentityFile {dir}/rsa"),
    Row("rsa-key-in-the-agent", "IdentityAgent SSH_AUTH_SOCK; IdentityFile none", agent=("rsa",)),
    Row(
        "keys-that-are-not-there", "IdentityFile {dir}/not-there; IdentityFile ~no-such-user/id; IdentityFile {dir}/id"
    ),
    Row("tokens-in-a-key's-name", "IdentityFile {dir}/%r-%p"),
    Row("variable-in-a-key's-name", "IdentityFile ${{WORLD}}/id"),
    Row("hashed-known-hosts", "UserKnownHostsFile {dir}/hashed"),
    Row("host-key-alias", "HostKeyAlias the-box; UserKnownHostsFile {dir}/aliased"),
    Row("known-without-the-port", "UserKnownHostsFile {dir}/bare_name"),
    Row("known-by-a-pattern", "UserKnownHostsFile {dir}/patterns"),
    Row("known-in-the-second-file", "UserKnownHostsFile {dir}/not-there {dir}/known_hosts"),
    Row("known-globally", "UserKnownHostsFile none; GlobalKnownHostsFile {dir}/known_hosts"),
    Row("two-keys-of-a-kind-known", "UserKnownHostsFile {dir}/rotating"),
    Row("only-its-ecdsa-key-known", "UserKnownHostsFile {dir}/ecdsa_known"),
    Row("only-its-rsa-key-known", "UserKnownHostsFile {dir}/rsa_known"),
    Row("check-host-ip", "CheckHostIP yes"),
    Row(
        "algorithms",
        "Ciphers aes256-gcm@openssh.com; KexAlgorithms curve25519-sha256; MACs hmac-sha2-512; "
        "HostKeyAlgorithms rsa-sha2-256",
    ),
    Row("compression", "Compression yes"),
    Row(
        "what-has-no-meaning-here",
        "RequestTTY force; RemoteCommand false; ControlMaster auto; ControlPath {dir}/%C; ControlPersist 9; "
        "SetEnv A=b; LocalForward 1 a:1; StrictHostKeyChecking accept-new; ServerAliveInterval 99; "
        "PermitLocalCommand yes; LocalCommand false; ForwardAgent yes",
    ),
]
OUT = [
    Refusal(
        "wrong-key",
        "IdentityFile {dir}/stranger; IdentitiesOnly yes",
        UnreachableError,
        "refused our key (box, root@127.0.0.1:{target}): tried: {dir}/stranger ... ssh-copy-id -F {dir}/config box",
    ),
    Refusal("no-key-at-all", "IdentityFile none", UnreachableError, "there is no key to log in with"),
    Refusal(
        "crowded-agent",
        "IdentityAgent SSH_AUTH_SOCK; IdentityFile {dir}/rsa",
        UnreachableError,
        "too many keys ... IdentitiesOnly yes",
        agent=CROWD,
    ),
    Refusal(
        "public-half-of-nobody",
        "IdentityFile {dir}/id-public; IdentitiesOnly yes",
        ConfigError,
        "there is no private key in the file ... {dir}/id-public. Next: correct",
    ),
    Refusal(
        "locked-key-nobody-to-ask",
        "IdentityFile {dir}/locked",
        UnreachableError,
        "locked by a passphrase ... Next: ssh-add {dir}/locked",
    ),
    Refusal(
        "key-excluded",
        "PubkeyAcceptedAlgorithms rsa-sha2-512",
        UnreachableError,
        "{dir}/id: PubkeyAcceptedAlgorithms excludes it",
    ),
    Refusal(
        "unknown-host-key",
        "UserKnownHostsFile {dir}/empty",
        HostKeyError,
        "the host key of [127.0.0.1]:{target} is not known ... ssh-ed25519 {shown} is not in {dir}/empty ... "
        "then: echo '[127.0.0.1]:{target} ssh-ed25519 AAAA",
    ),
    Refusal(
        "unknown-though-checking-is-off",
        "StrictHostKeyChecking no; UserKnownHostsFile {dir}/empty",
        HostKeyError,
        "is not known",
    ),
    Refusal(
        "unknown-known-hosts-command",
        "KnownHostsCommand /bin/echo %H; UserKnownHostsFile {dir}/empty",
        HostKeyError,
        "KnownHostsCommand is not run",
    ),
    Refusal(
        "unknown-with-no-file-to-add-to",
        "UserKnownHostsFile /dev/null",
        HostKeyError,
        "is not in /dev/null ... name a UserKnownHostsFile ... to hold this line: '[127.0.0.1]:{target} ssh-ed25519",
    ),
    Refusal("unknown-with-no-file", "UserKnownHostsFile none", HostKeyError, "is not in any file: none is named"),
    Refusal(
        "unknown-with-no-folder",
        "UserKnownHostsFile {dir}/new/known_hosts",
        HostKeyError,
        "then: mkdir -p -m 700 {dir}/new && echo ... >> {dir}/new/known_hosts",
    ),
    Refusal(
        "changed-host-key",
        "UserKnownHostsFile {dir}/changed",
        HostKeyError,
        "has changed ... {stranger} ({dir}/changed:1) ... shows ssh-ed25519 {shown} ... "
        "ssh-keygen -f {dir}/changed -R '[127.0.0.1]:{target}'",
    ),
    Refusal(
        "changed-host-key-of-the-address",
        "Host box; HostName localhost; AddressFamily inet; CheckHostIP yes; UserKnownHostsFile {dir}/wrong_address",
        HostKeyError,
        "has changed ... ({dir}/wrong_address:4)",
    ),
    Refusal(
        "another-kind-of-key",
        "HostKeyAlgorithms ssh-ed25519; UserKnownHostsFile {dir}/ecdsa_known",
        HostKeyError,
        "known_hosts has only ecdsa-sha2-nistp256 SHA256: ... shows ssh-ed25519 {shown}",
    ),
    Refusal(
        "revoked-host-key",
        "UserKnownHostsFile {dir}/revoked",
        HostKeyError,
        "is revoked ... revoked by ssh-ed25519 {shown} ({dir}/revoked:4). Next",
    ),
    Refusal(
        "revoked-by-a-list", "RevokedHostKeys {dir}/revoked_keys", HostKeyError, "is revoked ... ({dir}/revoked_keys:1)"
    ),
    Refusal("revoked-by-a-krl", "RevokedHostKeys {dir}/krl", ConfigError, "is a KRL"),
    Refusal(
        "revoked-by-nothing",
        "RevokedHostKeys {dir}/not-there",
        ConfigError,
        "RevokedHostKeys names no file ... {dir}/not-there",
    ),
    Refusal(
        "host-certificate",
        "UserKnownHostsFile {dir}/authority",
        HostKeyError,
        "@cert-authority ... host certificates can't be checked",
    ),
    Refusal(
        "alias-not-known",
        "HostKeyAlias other-box",
        HostKeyError,
        "the host key of other-box is not known ... echo 'other-box ssh-ed25519",
    ),
    Refusal(
        "jump-not-known",
        "UserKnownHostsFile {dir}/target_only; Host box; ProxyJump gate",
        HostKeyError,
        "[127.0.0.1]:{gate} is not known ... (box, jump gate, root@127.0.0.1:{gate})",
    ),
    Refusal(
        "jump-changed",
        "UserKnownHostsFile {dir}/stranger_at_the_gate; Host box; ProxyJump gate",
        HostKeyError,
        "[127.0.0.1]:{gate} has changed ... jump gate",
    ),
    Refusal(
        "jump-refuses-the-key",
        "Host gate; User nobody; Host box; ProxyJump gate",
        UnreachableError,
        "refused our key (box, jump gate, nobody@127.0.0.1:{gate}) ... ssh-copy-id -F {dir}/config gate",
    ),
    Refusal(
        "jump-to-nowhere",
        "Host box; HostName 127.0.0.1; Port 1; ProxyJump gate",
        UnreachableError,
        "(box, root@127.0.0.1:1): the jump before it can't connect: connecting failed",
    ),
    Refusal(
        "jump-that-is-not-there",
        "Host gate; HostName 127.0.0.1; Port 1; Host box; ProxyJump gate",
        UnreachableError,
        "(box, jump gate, root@127.0.0.1:1): Connection refused ... Next: ssh -F {dir}/config gate true",
    ),
    Refusal(
        "jump-in-a-circle",
        "Host gate; ProxyJump outer; Host outer; ProxyJump gate; Host box; ProxyJump gate",
        ConfigError,
        "goes round in a circle ... box -> gate -> outer -> gate",
    ),
    Refusal("jump-that-can't-be-read", "Host box; ProxyJump [::1", ConfigError, "the ssh configuration can't be used"),
    Refusal(
        "proxy-command-that-fails",
        "Host box; ProxyCommand sh -c 'echo no way >&2 && exit 3'",
        UnreachableError,
        "no way; it ended with 3",
    ),
    Refusal(
        "proxy-command-of-nobody",
        "Host box; ProxyCommand no-such-program %h",
        UnreachableError,
        "no-such-program ... it ended with 127",
    ),
    Refusal(
        "proxy-command-that-passes-a-socket",
        "ProxyUseFdpass yes; Host box; ProxyCommand false",
        ConfigError,
        "ProxyUseFdpass can't be honoured",
    ),
    Refusal(
        "no-keys-allowed",
        "PubkeyAuthentication no",
        ConfigError,
        "PubkeyAuthentication no can't be honoured ... keys only",
    ),
    Refusal(
        "passwords-only",
        "PreferredAuthentications password",
        ConfigError,
        "PreferredAuthentications password can't be honoured",
    ),
    Refusal("interface", "BindInterface lo", ConfigError, "BindInterface can't be honoured"),
    Refusal(
        "nothing-in-common",
        "Ciphers chacha20-poly1305@openssh.com",
        ConfigError,
        "Ciphers of the ssh configuration allows nothing that we know ... allow one of aes128-ctr",
    ),
    Refusal("token-of-nothing", "IdentityFile {dir}/%C", ConfigError, "%C stands for nothing"),
    Refusal("variable-of-nothing", "IdentityFile ${{NO_SUCH_VARIABLE}}/id", ConfigError, "NO_SUCH_VARIABLE"),
    Refusal(
        "not-a-configuration",
        "Hots box",
        ConfigError,
        "the ssh configuration can't be used ... line 2: Bad configuration option: hots",
    ),
    Refusal(
        "no-such-host",
        "Host box; HostName no-such-host.invalid",
        UnreachableError,
        "no such host ... HostName in the ssh configuration",
    ),
    Refusal("wrong-family", "AddressFamily inet6", UnreachableError, "no such host"),
    Refusal("address-that-is-not-ours", "BindAddress 192.0.2.1", UnreachableError, "Cannot assign requested address"),
]
