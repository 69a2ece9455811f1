"""A model's program against the sandbox. Each escape says what it reached; nothing may be."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_rl.config.rollout_schema import Sandbox
from slurm_rl.config.schema import Settings
from slurm_rl.errors import ConfigError
from slurm_rl.rollout.sandbox import confine, jail, runner
from slurm_rl.rollout.sandbox.runner import (
    Isolation,
    RunResult,
    describe,
    find_isolation,
    is_needed,
    run_python,
)

LIMITS = Sandbox(timeout_s=20.0, memory_mb=512)
QUICK = Sandbox(timeout_s=1.0, memory_mb=512)
BEST_EFFORT = Sandbox(timeout_s=20.0, memory_mb=512, require="best_effort")
#: An interpreter that any user can read, for runs without a root of their own.
SYSTEM_PYTHON = next((p for p in ("/usr/bin/python3",) if os.access(p, os.X_OK)), None)

isolated = find_isolation()
needs_namespaces = pytest.mark.skipif(
    not isolated.isolated, reason=f"no namespaces: {isolated.why}"
)
needs_python = pytest.mark.skipif(SYSTEM_PYTHON is None, reason="no /usr/bin/python3")


def run(code: str, limits: Sandbox = LIMITS, **options: Any) -> RunResult:
    return asyncio.run(run_python(code, limits=limits, **options))


def bare(code: str, limits: Sandbox = BEST_EFFORT) -> RunResult:
    """A run with limits alone."""
    return run(code, limits, isolate=False, python=SYSTEM_PYTHON)


def children() -> set[str]:
    found = jail.children_of(os.getpid())
    return {str(pid) for pid in found}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = children()
    folders = set(Path("/tmp").glob("slurm-rl-sandbox-*"))
    yield
    assert children() <= before
    assert set(Path("/tmp").glob("slurm-rl-sandbox-*")) <= folders


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder in which anybody may do anything: what fails there fails by the sandbox."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-rl-public-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@needs_namespaces
def test_a_program_reads_and_writes_and_imports() -> None:
    code = "import json, sys\nopen('a', 'w').write(input())\nprint(json.dumps(open('a').read(), ensure_ascii=False))\nsys.exit(0)"
    result = run(code, stdin="ä\n")
    assert (result.status, result.stdout, result.stderr) == ("ok", '"ä"\n', "")
    assert result.isolated
    result = run("import numpy; print(numpy.arange(4).sum())")
    assert result.stdout == "6\n"


@needs_namespaces
@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("raise ValueError('x')", "error", "ValueError: x"),
        ("import sys; sys.exit(3)", "error", ""),
        ("syntax error", "error", "SyntaxError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "killed", ""),
        ("x = bytearray(10**10)", "error", "MemoryError"),
        ("print('x' * 10**8)", "output", ""),
        ("import os\nos.close(1); os.close(2)", "ok", ""),
        ("print('\\ud800')", "error", "UnicodeEncodeError"),
        ("import os; os.write(1, bytes([255, 254]))", "ok", ""),
    ],
)
def test_how_it_ended(code: str, status: str, message: str) -> None:
    result = run(code)
    assert result.status == status, result
    assert message in result.stderr
    assert len(result.stdout) <= runner.OUTPUT_BYTES


@needs_namespaces
@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(100)",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
        "import os\nif os.fork() == 0:\n    os.setsid()\n    while True: pass\nos.wait()",
        "import os\nif os.fork() == 0:\n    while True: pass\nos.wait()",
    ],
)
def test_what_never_ends_is_ended(code: str) -> None:
    began = time.monotonic()
    assert run(code, QUICK).status == "timeout"
    assert time.monotonic() - began < 30


@needs_namespaces
def test_no_variable_of_ours_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret-of-ours")
    result = run("import os; print(dict(os.environ))")
    assert result.status == "ok"
    assert "secret-of-ours" not in result.stdout
    code = f"""
import glob, os
for path in [*glob.glob('/proc/*/environ'), '/proc/{os.getpid()}/environ']:
    try:
        print(open(path, 'rb').read())
    except OSError:
        pass
print(len(glob.glob('/proc/*')))
"""
    assert run(code).stdout == "0\n"


@needs_namespaces
def test_nothing_is_written_outside_its_folder(public: Path) -> None:
    probe = public / "reached"
    mark = f"slurm-rl-escape-{os.getpid()}"
    code = f"""
import os, sys
places = ['{probe}', os.path.expanduser('~root/{mark}'), '/usr/{mark}', '/etc/{mark}', '/{mark}',
    '/dev/{mark}', '/dev/shm/{mark}', '/var/tmp/{mark}', '{sys.prefix}/{mark}', '/home/{mark}',
    '{Path(runner.__file__).parent}/{mark}']
for place in places:
    try:
        open(place, 'w').write('x')
        print(place)
    except OSError:
        pass
open('/tmp/{mark}', 'w').write('x')
"""
    result = run(code)
    assert (result.status, result.stdout) == ("ok", "")
    assert not probe.exists()
    assert not Path(f"/tmp/{mark}").exists()


@needs_namespaces
def test_links_in_its_folder_lead_nowhere(public: Path) -> None:
    (public / "secret").write_text("of ours")
    code = f"""
import os
os.symlink('{public}', 'inside')
os.symlink('/', 'root')
for path in ('inside/secret', 'root{public}/secret', '../../../../..{public}/secret',
    '/.old{public}/secret', '/proc/1/root{public}/secret'):
    try:
        print(open(path).read())
    except OSError:
        pass
try:
    os.link('/usr/bin/env', 'hard')
    print('linked')
except OSError:
    pass
"""
    assert run(code).stdout == ""


@needs_namespaces
def test_the_root_shows_nothing_else() -> None:
    shown = set(run("import os; print(*os.listdir('/'))").stdout.split())
    folders = {path.split("/")[1] for path in runner._own_folders()[0]}
    assert shown <= {
        "usr",
        "bin",
        "sbin",
        "lib",
        "lib32",
        "lib64",
        "nix",
        "gnu",
        "etc",
        "dev",
        "tmp",
        *folders,
    }
    assert set(run("import os; print(*os.listdir('/dev'))").stdout.split()) == {
        "null",
        "zero",
        "random",
        "urandom",
    }
    assert "passwd" not in run("import os; print(*os.listdir('/etc'))").stdout


@pytest.mark.slow
@needs_namespaces
def test_the_jail_itself_carries_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a namespace of processes a program of the same user could read them there."""
    monkeypatch.setenv("API_KEY", "secret-of-ours")

    async def look() -> list[bytes]:
        task = asyncio.create_task(run_python("import time; time.sleep(2)", limits=LIMITS))
        found: list[bytes] = []
        while not task.done():
            await asyncio.sleep(0.1)
            for pid in jail.children_of(os.getpid()):
                if "sandbox.jail" in _command(str(pid)):  # else it is still a copy of ourselves
                    try:
                        found.append(Path(f"/proc/{pid}/environ").read_bytes())
                    except OSError:
                        continue  # it ended
        return found

    found = asyncio.run(look())
    assert found
    assert not any(b"secret-of-ours" in text for text in found)


@needs_namespaces
def test_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
import socket
for address in (('127.0.0.1', {port}), ('{socket.gethostname()}', {port}), ('1.1.1.1', 53)):
    try:
        socket.create_connection(address, timeout=2)
        print('reached', address)
    except OSError:
        pass
"""
        assert run(code).stdout == ""
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()


@needs_namespaces
def test_abstract_sockets_are_not_shared() -> None:
    with socket.socket(socket.AF_UNIX) as server:
        name = f"\0slurm-rl-{os.getpid()}"
        server.bind(name)
        server.listen()
        code = f"import socket\nsocket.socket(socket.AF_UNIX).connect({name!r})"
        assert "ConnectionRefused" in run(code).stderr


@needs_namespaces
def test_other_processes_cannot_be_signalled() -> None:
    victim = subprocess.Popen(["sleep", "60"])
    try:
        code = f"""
import os, signal
for pid in range(2, 100_000):
    if pid != os.getpid():
        try:
            os.kill(pid, signal.SIGKILL)
            print('killed', pid)
        except OSError:
            pass
for pid in ({victim.pid}, {os.getpid()}, -1):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
"""
        assert "killed" not in run(code).stdout
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


@needs_namespaces
def test_it_has_no_rights_and_gets_none() -> None:
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(os.getuid(), os.geteuid(), os.getgroups() in ([], [65534]))
for name, call in {
    'user namespace': lambda: libc.unshare(0x10000000),
    'mount namespace': lambda: libc.unshare(0x00020000),
    'mount': lambda: libc.mount(b'tmpfs', b'/usr', b'tmpfs', 0, None),
    'remount': lambda: libc.mount(None, b'/', None, 32 | 4096, None),
    'umount': lambda: libc.umount2(b'/tmp', 2),
    'chroot': lambda: libc.chroot(b'/tmp'),
    'setuid': lambda: libc.setresuid(0, 0, 0),
    'device': lambda: libc.mknod(b'/tmp/sda', 0o60666, 0x0800),
    'nice': lambda: libc.setpriority(0, 0, -5),
}.items():
    if call() == 0:
        print('can', name)
"""
    assert run(code).stdout == "65534 65534 True\n"


@needs_namespaces
def test_a_fork_bomb_is_bounded() -> None:
    code = """
import os, time
num = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
        num += 1
except OSError:
    print(num)
"""
    result = run(code)
    assert result.status == "ok", result
    assert 1 < int(result.stdout) <= runner.NUM_PROCESSES
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    assert run(bomb, QUICK).status in ("timeout", "memory")


@needs_namespaces
def test_memory_of_many_processes_is_bounded_too() -> None:
    code = """
import os, time
for _ in range(20):
    if os.fork() == 0:
        block = bytearray(300 << 20)
        for i in range(0, len(block), 4096):
            block[i] = 1
        time.sleep(60)
time.sleep(60)
"""
    assert run(code).status == "memory"


@needs_namespaces
def test_the_disk_is_bounded() -> None:
    code = """
total = 0
try:
    for i in range(1000):
        with open(f'f{i}', 'wb') as file:
            for _ in range(10):
                file.write(bytes(1 << 20))
                file.flush()
                total += 1
except OSError as error:
    print(total, error.errno)
"""
    total, code_of_error = map(int, run(code).stdout.split())
    assert total <= runner.DISK_MB
    assert code_of_error in (27, 28)
    many = "for i in range(10**6): open(f'f{i}', 'w').close()"
    assert "No space left" in run(many).stderr


def survivor(mark: Path) -> str:
    """A daemon that would write long after its program ended."""
    return f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3):
            os.close(fd)
        time.sleep(1.5)
        open('{mark}', 'w').close()
        os._exit(0)
    os._exit(0)
os.wait()
print('left')
"""


@needs_namespaces
def test_no_daemon_survives() -> None:
    before = set(os.listdir("/proc"))
    assert run(survivor(Path("/tmp/x"))).stdout == "left\n"
    new = [pid for pid in set(os.listdir("/proc")) - before if pid.isdigit()]
    assert not [pid for pid in new if _command(pid).endswith(runner.PROGRAM_NAME)]


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").replace("\0", " ")
    except OSError:
        return ""


@needs_namespaces
def test_cancelling_ends_the_run() -> None:
    async def cancel() -> None:
        task = asyncio.create_task(run_python("while True: pass", limits=LIMITS))
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    began = time.monotonic()
    asyncio.run(cancel())
    assert time.monotonic() - began < 19, "its limit is twenty seconds"


@pytest.mark.slow
@needs_namespaces
def test_the_death_of_the_caller_ends_the_run(tmp_path: Path) -> None:
    code = (
        "import asyncio\n"
        "from slurm_rl.config.rollout_schema import Sandbox\n"
        "from slurm_rl.rollout.sandbox.runner import run_python\n"
        "print('on', flush=True)\n"
        f"asyncio.run(run_python('while True: pass # {tmp_path.name}', limits=Sandbox(timeout_s=60.0)))"
    )
    caller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert caller.stdout is not None
    caller.stdout.readline()
    time.sleep(1.5)
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    caller.stdout.close()
    deadline = time.monotonic() + 60
    while any(_parent(pid) == caller.pid or _is_program(pid) for pid in os.listdir("/proc")):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _is_program(pid: str) -> bool:
    return pid.isdigit() and _command(pid).endswith(f"-s {runner.PROGRAM_NAME}")


def _parent(pid: str) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return 0


@needs_namespaces
@needs_python
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_an_ordinary_user_is_isolated_as_well(tmp_path: Path) -> None:
    """As a user without any rights, with the interpreter of the system."""
    package = Path(runner.__file__).parents[2]
    copy = tmp_path / "slurm_rl"
    (copy / "rollout").mkdir(parents=True)
    shutil.copy(package / "__init__.py", copy)
    shutil.copy(package / "rollout" / "__init__.py", copy / "rollout")
    shutil.copytree(Path(runner.__file__).parent, copy / "rollout" / "sandbox")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if folder != Path("/tmp"):
            folder.chmod(0o755)
    own = tmp_path / "own"  # as its interpreter's folder, which it may write to by its rights
    own.mkdir()
    os.chown(own, 1234, 1234)
    code = f"""
import os
try:
    open('{own}/reached', 'w')
except OSError as error:
    print(error.errno)
print(os.getuid(), os.path.exists('/root'), os.path.exists('/proc/1'))
"""
    spec = runner._plan(code, stdin="", limits=LIMITS, python=SYSTEM_PYTHON, folder=None)
    spec["binds"] = [str(own)]
    boot = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from slurm_rl.rollout.sandbox.jail import main; main()"
    process = subprocess.Popen(
        [str(SYSTEM_PYTHON), "-I", "-S", "-B", "-c", boot],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        user=1234,
        group=1234,
        extra_groups=[],
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps({**spec, "isolate": True}).encode() + b"\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.read())
    process.stdin.close()
    process.stdout.close()
    process.wait()
    assert answer["isolated"], answer
    assert answer["stdout"] == "30\n65534 False False\n"  # 30: a read-only file system
    assert os.listdir(own) == []


@pytest.mark.slow
@needs_python
def test_limits_hold_without_namespaces(public: Path) -> None:
    result = bare("import os; open('a', 'w').write('x'); print(os.listdir('.'), os.getuid())")
    assert result.status == "ok", result
    assert not result.isolated
    assert (
        bare("while True: pass", QUICK.model_copy(update={"require": "best_effort"})).status
        == "timeout"
    )
    assert "MemoryError" in bare("x = bytearray(10**10)").stderr
    assert bare("print('x' * 10**8)").status == "output"
    mark = public / "survived"
    assert bare(survivor(mark)).stdout == "left\n"
    time.sleep(2.5)
    assert not mark.exists()


@needs_python
def test_the_folder_goes_with_what_it_holds(public: Path) -> None:
    """Also a folder that locks its owner out; what a link leads to stays."""
    (public / "kept").write_text("x")
    code = f"import os; os.makedirs('a/b'); os.symlink('{public}', 'a/link'); open('a/b/c', 'w'); os.chmod('a/b', 0); os.chmod('a', 0)"
    assert bare(code).status == "ok"
    assert (public / "kept").exists()


@needs_python
def test_root_becomes_nobody_in_any_case() -> None:
    wanted = "65534 65534" if os.geteuid() == 0 else f"{os.getuid()} {os.getgid()}"
    assert bare("import os; print(os.getuid(), os.getgid())").stdout.strip() == wanted


def test_isolation_is_demanded_or_said(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        ConfigError, match="require = 'isolated': this machine cannot run"
    ) as caught:
        runner._judge({"status": "unavailable", "why": "a user namespace: No space left"}, LIMITS)
    assert "allow user namespaces there, or set require: best_effort" in str(caught.value)
    answer = {"status": "ok", "stdout": "", "stderr": "", "seconds": 0.0, "isolated": False}
    for _ in range(2):
        runner._judge({**answer, "isolation": "some reason"}, BEST_EFFORT)
    assert [r.message for r in caplog.records if "some reason" in r.message] == [
        f"a model's code runs {describe(Isolation(False, 'some reason'))}"
    ]


def test_where_a_place_is_needed(make_settings: Any) -> None:
    def needs(**rollout: Any) -> bool:
        settings: Settings = make_settings(**rollout)
        return is_needed(settings)

    assert not needs()
    assert needs(rm_type="code")
    assert needs(tools=["python"])
    assert needs(rm_type=None, rewards=[{"rm_type": "code"}])
    assert needs(prompt_data=[{"name": "a", "path": "/a", "rm_type": "code"}])


def test_the_children_of_a_process_by_either_way() -> None:
    child = subprocess.Popen(["sleep", "30"])
    try:
        assert child.pid in jail.children_of(os.getpid())
        assert jail.children_of(os.getpid()) == sorted(jail._scan_children(os.getpid()))
        assert jail.resident_mb(os.getpid()) > 0
        assert confine.count_tasks(os.geteuid()) > 1
    finally:
        child.kill()
        child.wait()
    assert child.pid not in jail.children_of(os.getpid())
