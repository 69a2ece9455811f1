"""The `code` reward: runs the program in a response against its tests, in the sandbox."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from slurm_rl.errors import RewardError
from slurm_rl.rollout.rewards.means import Means
from slurm_rl.rollout.rewards.texts import after_thinking, last_code
from slurm_rl.rollout.samples import Sample
from slurm_rl.rollout.sandbox.runner import run_python

_SOLUTION, _TEST = "solution.py", "test.py"
#: Runs the program, then a test in its names; says the secret only after both came to their end,
#: so that a program that leaves early has not passed. What it uses then it took before, since a
#: program may change builtins. In one process there is no defence against one that looks for the
#: secret in our frames: where that matters, test by inputs and outputs.
_HARNESS = f"""
def main(run=exec):
    import os, sys
    say, secret = os.write, sys.stdin.readline()
    codes = [compile(open(name).read(), name, "exec") for name in ("{_SOLUTION}", "{_TEST}")]
    os.unlink("{_TEST}")
    names = {{"__name__": "solution"}}
    for code in codes:
        run(code, names)
    sys.stdout.flush()
    say(1, b"\\n" + secret.encode())
main()
"""


async def code_reward(means: Means, args: Any, sample: Sample) -> float:
    """The share of its tests that the response's program passes.

    Tests are in `metadata` (or there under `tests`, or the label is them, as an object or JSON):
    {"inputs": […], "outputs": […]} for standard input and output, {"asserts": […]} or {"test": …}
    for Python code; with `entry_point`, `check(entry_point)` is called. reward_options:
    `all_or_nothing`: 1 for all tests passed, else 0; `max_tests`: only the first ones.
    """
    tests = find_tests(sample)
    tests = tests[: int(args.reward_options.get("max_tests", len(tests)))]
    code = last_code(after_thinking(sample.response))
    if args.reward_options.get("all_or_nothing"):
        for test in tests:
            if not await test(code, means):
                return 0.0
        return 1.0
    passed = await asyncio.gather(*(test(code, means) for test in tests))
    return sum(passed) / len(passed)


Test = Callable[[str, Means], Awaitable[bool]]


def find_tests(sample: Sample) -> list[Test]:
    """The tests of a sample; RewardError if it has none."""
    for source in (sample.metadata.get("tests"), sample.metadata, sample.label):
        found = _parse_tests(source)
        if found:
            return found
    raise RewardError(
        "code: the sample has no tests: neither inputs and outputs, nor asserts, nor test",
        hint="put them into the row's metadata (rollout.metadata_key)",
    )


def _parse_tests(source: Any) -> list[Test]:
    if isinstance(source, str):
        try:
            source = json.loads(source)
        except ValueError:
            return []
    if not isinstance(source, dict):
        return []
    if "inputs" in source and "outputs" in source:
        inputs, outputs = source["inputs"], source["outputs"]
        if len(inputs) != len(outputs):
            raise RewardError(f"code: {len(inputs)} inputs, but {len(outputs)} outputs")
        return [_talk_test(_text(a), _text(b)) for a, b in zip(inputs, outputs, strict=True)]
    codes = source.get("asserts", source.get("test"))
    codes = [codes] if isinstance(codes, str) else codes or []
    setup = str(source.get("setup", ""))
    call = f"\ncheck({source['entry_point']})\n" if source.get("entry_point") else ""
    return [_python_test(f"{setup}\n{code}\n{call}") for code in codes]


def _text(value: Any) -> str:
    """Lines, where a data set has them as a list."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _talk_test(given: str, wanted: str) -> Test:
    async def passes(code: str, means: Means) -> bool:
        limits = means.settings.rollout.sandbox
        result = await run_python(code, stdin=given, limits=limits)
        return result.status == "ok" and result.stdout.split() == wanted.split()

    return passes


def _python_test(test: str) -> Test:
    async def passes(code: str, means: Means) -> bool:
        secret = secrets.token_hex(16)
        files = {_SOLUTION: code, _TEST: test}
        limits = means.settings.rollout.sandbox
        result = await run_python(_HARNESS, stdin=secret + "\n", limits=limits, files=files)
        return result.status == "ok" and result.stdout.rstrip("\n").endswith("\n" + secret)

    return passes
