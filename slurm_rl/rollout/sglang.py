"""An engine over a real SGLang server, started from the weights on disk and spoken to by HTTP.

Owns the command line, the version check and the translation to and from `/generate`. The
server is given a label (run, version, digest) as its `--weight-version`; the label and the
path are checked before anything is generated, and the label again in every result: a result
of other weights is an EngineError, never a sample.

Each group is one HTTP request with one entry a sample, each with its own `sampling_seed`:
SGLang's `n` would give every sample the same seed. SGLang honours seeds only under
`--enable-deterministic-inference`, which is set in deterministic mode.
"""

from __future__ import annotations

import http.client
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slurm_rl.config.schema import Settings
from slurm_rl.errors import ConfigError, EngineError, ModelError
from slurm_rl.rollout.engine import Completion, Group, Request, Sampling, Weights
from slurm_rl.rollout.server_process import (
    ServerProcess,
    find_free_port,
    start_server,
    wait_until,
)

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_START_ATTEMPTS = 3
#: Arguments that the engine sets; a config that sets them too would contradict it.
_OURS = frozenset({"model_path", "model", "host", "port", "weight_version"})
_FINISH: dict[str, Literal["stop", "length", "abort"]] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
}


@dataclass(frozen=True, slots=True)
class SglangOptions:
    """What a server needs to know beside its weights.

    arguments:   SGLang's own server arguments, as in `rollout.sglang`.
    environment: the whole environment of the server process.
    concurrency: samples in flight at once.
    """

    arguments: Mapping[str, Any]
    environment: Mapping[str, str]
    log_path: Path
    python: str = sys.executable
    deterministic: bool = False
    random_seed: int = 0
    concurrency: int = 256
    start_timeout_s: float = 900.0
    request_timeout_s: float = 3600.0


def plan_options(
    settings: Settings, *, environment: Mapping[str, str], log_path: Path, random_seed: int
) -> SglangOptions:
    """The options that a run's settings mean, in the environment of this process."""
    rollout = settings.rollout
    own = {name: str(value) for name, value in rollout.sglang_env.items()}
    return SglangOptions(
        arguments=rollout.sglang,
        environment={**environment, **own},
        log_path=log_path,
        python=rollout.sglang_python or sys.executable,
        deterministic=settings.deterministic,
        random_seed=random_seed,
        concurrency=rollout.concurrency,
        start_timeout_s=rollout.server_start_timeout_s,
        request_timeout_s=rollout.request_timeout_s,
    )


def render_command(
    options: SglangOptions, weights: Weights, *, port: int, dtype: str | None
) -> list[str]:
    """The server's command line. ConfigError for an argument that the engine sets itself.

    dtype: of the weights; what the user set wins. SGLang's own default would serve float32
    weights in half precision, and rollout and trainer log-probs would drift apart.
    """
    arguments = {name.replace("-", "_"): value for name, value in options.arguments.items()}
    if taken := sorted(_OURS & arguments.keys()):
        raise ConfigError(f"rollout.sglang.{taken[0]} is set by the run itself", hint="remove it")
    ours: dict[str, Any] = {
        "model_path": str(weights.path),
        "host": _HOST,
        "port": port,
        "weight_version": weights.label,
        "random_seed": options.random_seed,
    }
    if dtype is not None:
        ours["dtype"] = dtype
    if options.deterministic:
        ours["enable_deterministic_inference"] = True
    command = [options.python, "-m", "sglang.launch_server"]
    for name, value in (ours | arguments).items():
        command += render_argument(name, value)
    return command


def read_dtype(path: Path) -> str | None:
    """The dtype that a model's config names, as `--dtype` takes it; None if it names none.

    Raises ModelError for a config that SGLang cannot serve, before a server is started for it.
    """
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}/config.json cannot be read: {error}") from error
    if not config.get("architectures"):
        raise ModelError(
            f"{path}/config.json has no `architectures`, by which SGLang chooses the model class",
            hint='add it, for example "architectures": ["LlamaForCausalLM"]',
        )
    name = config.get("dtype") or config.get("torch_dtype")
    return name if name in ("float32", "float16", "bfloat16") else None


def render_argument(name: str, value: Any) -> list[str]:
    """One setting as arguments: true is a bare flag, false and null are left out, a list is
    the flag and its values, an object is JSON."""
    flag = "--" + name.replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, list):
        return [flag, *(str(item) for item in value)]
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]


class SglangEngine:
    """See the module. One server on this node."""

    def __init__(self, options: SglangOptions) -> None:
        self._options = options
        self._server: ServerProcess | None = None
        self._port = 0
        self._label = ""

    @property
    def server(self) -> ServerProcess:
        if self._server is None:
            raise EngineError("no SGLang server was started")
        return self._server

    def start(self, weights: Weights) -> None:
        """Start a server and wait until it serves `weights`; EngineError says what it said.

        A port is taken by another between our looking and SGLang's binding, rarely; then the
        server is started again on another.
        """
        tried: frozenset[int] = frozenset()
        for attempt in range(1, _START_ATTEMPTS + 1):
            self._port = find_free_port(avoid=tried)
            tried |= {self._port}
            dtype = read_dtype(weights.path)
            command = render_command(self._options, weights, port=self._port, dtype=dtype)
            log.info("starts %s", " ".join(command))
            self._server = start_server(
                command, environment=self._options.environment, log_path=self._options.log_path
            )
            try:
                timeout_s = self._options.start_timeout_s
                wait_until(self._server, self._is_healthy, timeout_s=timeout_s)
                break
            except EngineError as error:
                self.stop()
                if "address already in use" not in str(error).lower() or attempt == _START_ATTEMPTS:
                    raise
                log.warning("port %d was taken meanwhile; trying another", self._port)
        self._label = weights.label
        self._check_served(weights)

    def load_weights(self, weights: Weights) -> None:
        """Load other weights into the running server. On a refusal the old ones stay served."""
        body = {
            "model_path": str(weights.path),
            "weight_version": weights.label,
            "flush_cache": True,
        }
        status, answer = self._call("POST", "/update_weights_from_disk", body)
        if status != 200 or not answer.get("success", False):
            raise EngineError(
                f"SGLang did not load {weights.path}: {answer.get('message', answer)}"
            )
        self._label = weights.label
        self._check_served(weights)

    def generate(self, requests: Iterable[Request], sampling: Sampling) -> Iterator[Group]:
        """Groups as they finish, with at most `concurrency` samples in flight."""
        todo = list(requests)
        widest = max((len(request.seeds) for request in todo), default=1)
        pool = ThreadPoolExecutor(max(1, self._options.concurrency // widest), "sglang")
        try:
            futures = {pool.submit(self._generate_group, r, sampling): r for r in todo}
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            # Not waited for: what is in flight ends when the server does.
            pool.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """Abort what runs, end the server, and check that nothing of it is left."""
        server, self._server = self._server, None
        if server is None:
            return
        try:
            # SIGTERM alone drains: it waits for every request in flight.
            self._call("POST", "/abort_request", {"abort_all": True}, timeout_s=5)
        except EngineError as error:
            log.info("nothing aborted: %s", error)
        server.stop()

    def _generate_group(self, request: Request, sampling: Sampling) -> list[Completion]:
        if self._server is None:  # stopped meanwhile: send nothing more
            raise EngineError("the SGLang engine was stopped")
        status, answer = self._call("POST", "/generate", render_request(request, sampling))
        if status != 200 or not isinstance(answer, list):
            raise EngineError(f"SGLang answered {status} to a request: {str(answer)[:300]}")
        if len(answer) != len(request.seeds):
            raise EngineError(f"SGLang gave {len(answer)} results for {len(request.seeds)} samples")
        return [parse_completion(result, label=self._label) for result in answer]

    def _is_healthy(self) -> bool:
        try:
            return self._call("GET", "/health", timeout_s=5)[0] == 200
        except EngineError:
            return False

    def _check_served(self, weights: Weights) -> None:
        _, info = self._call("GET", "/model_info", timeout_s=60)
        served = (info.get("model_path"), info.get("weight_version"))
        if served != (str(weights.path), weights.label):
            raise EngineError(
                f"SGLang serves {served[1]} from {served[0]}, not {weights.label} from"
                f" {weights.path}"
            )
        log.info("serves %s", weights.label)

    def _call(
        self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None
    ) -> tuple[int, Any]:
        """One HTTP exchange: status and parsed answer. EngineError if there is no answer."""
        wait_s = timeout_s or self._options.request_timeout_s
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=wait_s)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, parse_answer(response.read())
        except (OSError, http.client.HTTPException) as error:
            if self._server is not None:
                self._server.check_alive()
            raise EngineError(f"SGLang does not answer {path}: {error!r}") from error
        finally:
            connection.close()


def render_request(request: Request, sampling: Sampling) -> dict[str, Any]:
    """The body of `/generate` for one group: one entry a sample."""
    shared: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "skip_special_tokens": False,
    }
    if sampling.stop:
        shared["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        shared["stop_token_ids"] = list(sampling.stop_token_ids)
    return {
        "input_ids": [list(request.prompt_tokens)] * len(request.seeds),
        "sampling_params": [shared | {"sampling_seed": seed} for seed in request.seeds],
        "return_logprob": True,
    }


def parse_completion(result: Mapping[str, Any], *, label: str) -> Completion:
    """One result as a completion; EngineError if it is of other weights or inconsistent."""
    meta = result["meta_info"]
    served = str(meta.get("weight_version"))
    if served != label:
        raise EngineError(f"SGLang answered with the weights {served}, not {label}")
    pairs = meta["output_token_logprobs"]
    tokens = tuple(int(pair[1]) for pair in pairs)
    if tokens != tuple(result["output_ids"]):
        raise EngineError("SGLang's log-probs are of other tokens than its output")
    reason = (meta.get("finish_reason") or {}).get("type")
    if reason not in _FINISH:
        raise EngineError(f"SGLang ended a sample for the reason {reason!r}")
    return Completion(tokens, tuple(float(pair[0]) for pair in pairs), _FINISH[reason], served)


def parse_answer(data: bytes) -> Any:
    """The JSON of an answer; its text as {"message": …} where it is none."""
    try:
        return json.loads(data)
    except ValueError:
        return {"message": data.decode(errors="replace")[:300]}
