"""Nothing in the package turns bytes into code, starts a shell unasked, or looks away from a certificate."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"

MODULES = {
    "cPickle",
    "cloudpickle",
    "code",
    "dill",
    "joblib",
    "jsonpickle",
    "marshal",
    "pickle",
    "pty",
    "shelve",
}
"""They make objects, and so run code, out of bytes, or text into code."""
UNTIDY_MODULES = {"ftplib", "telnetlib", "xml", "xmlrpc", "yaml"}
"""Parsers with entities or tags, and protocols without encryption."""
CALLS = {"__import__", "compile", "eval", "exec", "input"}
DOTTED_CALLS = {
    "asyncio.create_subprocess_shell",
    "os.popen",
    "os.system",
    "ssl._create_unverified_context",
    "ssl.wrap_socket",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "tempfile.mktemp",
}
WEAK_HASHES = {"hashlib.md5", "hashlib.new", "hashlib.sha1"}
UNCHECKED = {"CERT_NONE"}
"""Names that mean: take any certificate."""
LOOKED_AT = "tailrace/client/rpc/server_trust.py"
"""A client that refused a certificate looks at it once more, to tell its names and times; nothing is sent."""
OWN = "tailrace/protocols/tls.py"
"""A broker looks at its own certificate in memory, whatever its names."""
SECRET_ROOMS = (
    "tailrace/broker/access/",
    "tailrace/cluster/",
    "tailrace/core/access/",
    "tailrace/protocols/",
)
"""Here chance comes from `secrets` and `os.urandom`."""
ALLOWED = {
    # It tells Spark to send a module's functions as code to its own workers; nothing that came is unpickled.
    "tailrace/spark/pipelines/programs.py: pyspark.cloudpickle",
}
SHELLS_ASKED_FOR = {
    # `tailrace consume --exec COMMAND`: the command is the user's own, messages come on its standard input.
    "tailrace/cli/commands/consume.py: asyncio.create_subprocess_shell",
}


def nodes() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted(SRC.rglob("*.py")):
        name = str(path.relative_to(SRC))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield name, node


def imports() -> Iterator[tuple[str, str]]:
    """(file, dotted name of what is imported)."""
    for name, node in nodes():
        if isinstance(node, ast.Import):
            yield from ((name, item.name) for item in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((name, f"{node.module}.{item.name}") for item in node.names)


def calls() -> Iterator[tuple[str, ast.Call, str]]:
    for name, node in nodes():
        if isinstance(node, ast.Call):
            yield name, node, ast.unparse(node.func)


def test_no_bytes_become_code() -> None:
    found = {
        f"{name}: {imported}"
        for name, imported in imports()
        if set(imported.split(".")) & MODULES or imported.split(".")[0] in UNTIDY_MODULES
    }
    assert found <= ALLOWED, found - ALLOWED
    assert found == ALLOWED, f"not needed any more: {ALLOWED - found}"
    called = [f"{name}:{node.lineno} {text}" for name, node, text in calls() if text in CALLS]
    assert called == []


def test_no_shell_is_started() -> None:
    found = {f"{name}: {text}" for name, _, text in calls() if text in DOTTED_CALLS}
    assert found == SHELLS_ASKED_FOR
    bad = [
        f"{name}:{node.lineno} shell=True"
        for name, node, _ in calls()
        for keyword in node.keywords
        if keyword.arg == "shell" and getattr(keyword.value, "value", None) is True
    ]
    assert bad == []


def test_certificates_are_checked_and_hashes_are_strong() -> None:
    bad = [f"{name}:{node.lineno} {text}" for name, node, text in calls() if text in WEAK_HASHES]
    for name, node in nodes():
        if isinstance(node, ast.Attribute) and node.attr in UNCHECKED:
            bad.append(f"{name}: {ast.unparse(node)}")
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Attribute) and target.attr == "check_hostname" for target in node.targets
        ):
            assert isinstance(node.value, ast.Constant), f"{name}:{node.lineno}"
            if not node.value.value:
                bad.append(f"{name}: {ast.unparse(node)}")
    assert sorted(bad) == [
        f"{LOOKED_AT}: context.check_hostname = False",
        f"{LOOKED_AT}: ssl.CERT_NONE",
        f"{OWN}: client.check_hostname = False",
    ]


def test_secrets_come_from_the_system() -> None:
    bad = [
        f"{name}: {imported}"
        for name, imported in imports()
        if name.startswith(SECRET_ROOMS) and imported.split(".")[0] in ("random", "uuid")
    ]
    assert bad == []
