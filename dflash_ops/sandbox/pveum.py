"""`pveum`: users, their tokens, roles and access lists, for root. Runs in the hypervisor.

Only what a person needs to give a token its rights: `user add|list|permissions`, `user token add|remove|modify|list`,
`role add|modify|list`, `acl modify|delete|list`.
"""

import json
import os
import sys
import uuid
from collections.abc import Callable
from typing import Any, NoReturn

from dflash_ops.sandbox.perl import Failure, say, take_time, through_perl
from dflash_ops.sandbox.processes import own_environment, own_words
from dflash_ops.sandbox.rights import PRIVILEGES, Entry, Rights


def main() -> NoReturn:
    """The program pveum."""
    try:
        words = [word.decode("utf-8", "replace") for word in through_perl(own_words(), own_environment())]
        _run(words)
        code = 0
    except Failure as failure:
        say(str(failure))
        code = failure.code
    take_time()
    sys.stdout.flush()
    sys.exit(code)


def _run(words: list[str]) -> None:
    if os.geteuid() != 0:
        raise Failure("please run as root")
    plain: list[str] = []
    options: dict[str, str] = {}
    while words:
        word, *words = words
        if not word.startswith("-"):
            plain.append(word)
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if not equals:
            value, *words = words or [""]
        options[_SINGULAR.get(name, name)] = value
    for length in (3, 2):
        command = _COMMANDS.get(" ".join(plain[:length]))
        if command is not None:
            rights = Rights.read()
            answer = command(rights, plain[length:], options)
            if answer is not None:
                as_json = options.get("output-format", "text").startswith("json")
                print(json.dumps(answer) if as_json else json.dumps(answer, indent=1))
            rights.write()
            return
    raise Failure(f"ERROR: unknown command 'pveum {' '.join(plain)}'")


def _user_add(rights: Rights, plain: list[str], options: dict[str, str]) -> None:
    (name,) = _given(plain, "userid")
    if name in rights.users:
        raise Failure(f"create user failed: user '{name}' already exists")
    rights.users[name] = options.get("enable", "1") == "1"


def _user_list(rights: Rights, _: list[str], __: dict[str, str]) -> Any:
    return [{"userid": name, "enable": int(enabled)} for name, enabled in rights.users.items()]


def _user_permissions(rights: Rights, plain: list[str], options: dict[str, str]) -> Any:
    (name,) = _given(plain, "userid")
    if "path" not in options:
        return rights.everywhere(name)
    return {options["path"]: {key: int(below) for key, below in rights.at(name, options["path"]).items()}}


def _token_add(rights: Rights, plain: list[str], options: dict[str, str]) -> Any:
    user, name = _given(plain, "userid", "tokenid")
    if user not in rights.users:
        raise Failure(f"no such user ('{user}')")
    token = f"{user}!{name}"
    if token in rights.tokens:
        raise Failure(
            f"400 Parameter verification failed.\ntokenid: Token already exists.\npveum user token add {token}"
        )
    rights.tokens[token] = options.get("privsep", "1") != "0"
    rights.secrets[token] = str(uuid.uuid4())
    info = {"privsep": str(int(rights.tokens[token]))}
    return {"full-tokenid": token, "info": info, "value": rights.secrets[token]}


def _token_modify(rights: Rights, plain: list[str], options: dict[str, str]) -> None:
    token = _token(rights, plain)
    rights.tokens[token] = options.get("privsep", str(int(rights.tokens[token]))) != "0"


def _token_remove(rights: Rights, plain: list[str], _: dict[str, str]) -> None:
    token = _token(rights, plain)
    del rights.tokens[token]
    rights.secrets.pop(token, None)
    rights.entries = [entry for entry in rights.entries if entry.who != token]


def _token_list(rights: Rights, plain: list[str], _: dict[str, str]) -> Any:
    (user,) = _given(plain, "userid")
    mine = {token: separated for token, separated in rights.tokens.items() if token.startswith(f"{user}!")}
    return [{"tokenid": token.partition("!")[2], "privsep": int(separated)} for token, separated in mine.items()]


def _token(rights: Rights, plain: list[str]) -> str:
    user, name = _given(plain, "userid", "tokenid")
    if f"{user}!{name}" not in rights.tokens:
        raise Failure(f"no such token '{name}' for user '{user}'")
    return f"{user}!{name}"


def _role_add(rights: Rights, plain: list[str], options: dict[str, str]) -> None:
    (name,) = _given(plain, "roleid")
    if name in rights.roles:
        raise Failure(f"role '{name}' already exists")
    rights.roles[name] = _privileges(options)


def _role_modify(rights: Rights, plain: list[str], options: dict[str, str]) -> None:
    (name,) = _given(plain, "roleid")
    if name not in rights.roles:
        raise Failure(f"role '{name}' does not exist")
    kept = rights.roles[name] if options.get("append", "0") != "0" else frozenset[str]()
    rights.roles[name] = kept | _privileges(options)


def _role_list(rights: Rights, _: list[str], __: dict[str, str]) -> Any:
    return [{"roleid": name, "privs": ",".join(sorted(words))} for name, words in rights.roles.items()]


def _privileges(options: dict[str, str]) -> frozenset[str]:
    words = options.get("privs", "").replace(",", " ").split()
    for word in words:
        if word not in PRIVILEGES:
            raise Failure(f"invalid privilege '{word}'")
    return frozenset(words)


def _acl_modify(rights: Rights, plain: list[str], options: dict[str, str]) -> None:
    for entry in _entries(rights, plain, options):
        rights.entries = [
            it for it in rights.entries if (it.path, it.who, it.role) != (entry.path, entry.who, entry.role)
        ]
        rights.entries.append(entry)


def _acl_delete(rights: Rights, plain: list[str], options: dict[str, str]) -> None:
    gone = [(entry.path, entry.who, entry.role) for entry in _entries(rights, plain, options)]
    rights.entries = [it for it in rights.entries if (it.path, it.who, it.role) not in gone]


def _acl_list(rights: Rights, _: list[str], __: dict[str, str]) -> Any:
    return [
        {"path": entry.path, "ugid": entry.who, "roleid": entry.role, "propagate": int(entry.propagate)}
        for entry in rights.entries
    ]


def _entries(rights: Rights, plain: list[str], options: dict[str, str]) -> list[Entry]:
    (path,) = _given(plain, "path")
    roles = _list(options.get("roles", ""))
    users, tokens = _list(options.get("users", "")), _list(options.get("tokens", ""))
    if not roles or not (users or tokens):
        raise Failure("400 Parameter verification failed.\nroles: property is missing and it is not optional")
    for role in roles:
        if role != "NoAccess" and not rights.role(role):
            raise Failure(f"role '{role}' does not exist")
    for name in users:
        if name not in rights.users:
            raise Failure(f"user '{name}' does not exist")
    for name in tokens:
        if name not in rights.tokens:
            raise Failure(f"no such token '{name.partition('!')[2]}' for user '{name.partition('!')[0]}'")
    propagate = options.get("propagate", "1") != "0"
    return [Entry(path, who, role, propagate) for who in (*users, *tokens) for role in roles]


def _list(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _given(plain: list[str], *names: str) -> list[str]:
    if len(plain) != len(names):
        raise Failure(f"400 not enough arguments\nneeds {' '.join(f'<{name}>' for name in names)}")
    return plain


_SINGULAR = {"user": "users", "token": "tokens", "role": "roles", "aclroles": "roles"}
_COMMANDS: dict[str, Callable[[Rights, list[str], dict[str, str]], Any]] = {
    "acl delete": _acl_delete,
    "acl list": _acl_list,
    "acl modify": _acl_modify,
    "role add": _role_add,
    "role list": _role_list,
    "role modify": _role_modify,
    "user add": _user_add,
    "user list": _user_list,
    "user permissions": _user_permissions,
    "user token add": _token_add,
    "user token list": _token_list,
    "user token modify": _token_modify,
    "user token permissions": lambda rights, plain, _: rights.everywhere("!".join(plain)),
    "user token remove": _token_remove,
}
