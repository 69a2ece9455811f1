"""A server that speaks SGLang's HTTP, well or badly: a real process for tests of what goes wrong.

Started as the real one is: `python fake_sglang.py -m sglang.launch_server --port … …`. Its tokens
and log-probs are a function of seed and position, so that a request asked twice, or of another
server, gets the same answer. How it misbehaves comes in FAKE (JSON), by server:

    {"0": {"die_at_start": true}, "1": {"die_after": 3, "delay_s": 0.2}, "*": {…}}

    die_at_start, late_s (not healthy before), hang_at_start
    die_after: n     ends in the n-th request, without an answer
    hang_after: n    from the n-th on no request is answered
    fail_after: n, fail_times: k     answers 500 to k requests from the n-th on
    reset_after: n, fail_times: k    breaks the connection of k requests from the n-th on
    bad: {…}         changes of an answer: see `spoil`
    port_taken       ends as SGLang does when its port is taken, at the first start

A file `counts-<server>.json` in FAKE_FOLDER says what it was asked.
"""

import base64
import json
import os
import socket
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ARGUMENTS = dict(zip(sys.argv[1:], [*sys.argv[2:], ""], strict=True))
FOLDER = Path(os.environ["FAKE_FOLDER"])
NUMBER = os.environ.get("FAKE_NUMBER") or ARGUMENTS.get("--random-seed", "0")
_ALL = json.loads(os.environ.get("FAKE", "{}"))
BEHAVIOUR = {**_ALL.get("*", {}), **_ALL.get(NUMBER, {})}
BORN = time.monotonic()

served = {
    "model_path": BEHAVIOUR.get("serves", ARGUMENTS["--model-path"]),
    "weight_version": ARGUMENTS["--weight-version"],
}
counts = {"generate": 0, "abort": 0, "seeds": [], "most": 0, "now": 0, "env": dict(os.environ)}
state = threading.Condition()
aborted = [0]


def draw(seed: int, position: int) -> tuple[int, float]:
    return (seed * 31 + position * 7) % 997, -0.25 - (seed + position) % 16 / 16


def complete(tokens: list[int], params: dict[str, object], *, generation: int) -> dict[str, object]:
    """As the real one: a draw depends on the seed and the position in the whole sequence."""
    seed, most = int(params["sampling_seed"]), int(params["max_new_tokens"])
    drawn, end = [], time.monotonic() + BEHAVIOUR.get("delay_s", 0.0)
    reason: dict[str, object] = {"type": "length", "length": most}
    for i in range(most):
        drawn.append(draw(seed, len(tokens) + i))
        if BEHAVIOUR.get("token_s"):
            time.sleep(BEHAVIOUR["token_s"])
        if aborted[0] > generation:
            reason = {"type": "abort", "message": "Abort"}
            break
        if drawn[-1][0] in params.get("stop_token_ids", ()):
            reason = {"type": "stop", "matched": drawn[-1][0]}
            break
    while time.monotonic() < end and aborted[0] == generation:
        time.sleep(0.005)
    meta = {
        "id": "x",
        "finish_reason": reason,
        "prompt_tokens": len(tokens),
        "cached_tokens": len(tokens) // 2,
        "completion_tokens": len(drawn),
        "weight_version": served["weight_version"],
        "output_token_logprobs": [[lp, token, None] for token, lp in drawn],
    }
    return {"text": "", "output_ids": [token for token, _ in drawn], "meta_info": meta}


def with_routing(answer: dict, tokens: list[int], *, asked: dict) -> dict:  # type: ignore[type-arg]
    """If asked, and if the server was started for it: int32[tokens - 1, 2 layers, 1 of 4 experts],
    the position modulo 4, and one more in the second layer."""
    if asked.get("return_routed_experts") and "--enable-return-routed-experts" in sys.argv:
        rows = len(tokens) + len(answer["output_ids"]) - 1
        ids = [(row + layer) % 4 for row in range(rows) for layer in range(2)]
        data = struct.pack(f"<{len(ids)}i", *ids)
        answer["meta_info"]["routed_experts"] = base64.b64encode(data).decode()
    return answer


def spoil(answer: object) -> object:
    """The answer as `bad` says: how many results are missing, what is wrong with the last."""
    bad = BEHAVIOUR.get("bad")
    if not bad or not isinstance(answer, list):
        return answer
    answer = answer[: len(answer) - bad.get("results", 0)]
    for result in answer[-1:]:
        spoil_result(result, bad)
    return answer


def spoil_result(result: dict[str, object], bad: dict[str, object]) -> None:
    meta = result["meta_info"]
    triples = meta["output_token_logprobs"]
    if "label" in bad:
        meta["weight_version"] = bad["label"]
    if "reason" in bad:
        meta["finish_reason"] = {"type": bad["reason"], "message": "no memory"}
    if "ids" in bad:
        result["output_ids"].pop()
    if "logprob" in bad:
        triples[0][0] = bad["logprob"]
    if "form" in bad:
        del triples[0][1:]
    if "empty" in bad:
        result["output_ids"], meta["output_token_logprobs"] = [], []
    for _ in range(bad.get("extra", 0)):
        result["output_ids"].append(1)
        triples.append([-0.5, 1, None])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/health":
            late = time.monotonic() - BORN < BEHAVIOUR.get("late_s", 0.0)
            self.answer({}, 503 if late or BEHAVIOUR.get("hang_at_start") else 200)
        elif self.path == "/v1/models":
            self.answer({"data": [{"id": ARGUMENTS.get("--served-model-name")}]})
        elif self.path == "/model_info":
            self.answer(served)
        elif self.path.startswith("/v1/loads"):
            load = {"num_running_reqs": counts["now"], "num_waiting_reqs": 1, "cache_hit_rate": 0.5}
            self.answer({"loads": [load]})
        else:
            self.answer({"message": "no such path"}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path == "/abort_request":
            with state:
                counts["abort"] += 1
                aborted[0] += 1
            self.answer({})
        elif self.path == "/update_weights_from_disk":
            if not (Path(body["model_path"]) / "config.json").exists() or BEHAVIOUR.get("no_load"):
                self.answer({"success": False, "message": "Failed to load"}, 400)
                return
            served.update(model_path=body["model_path"], weight_version=body["weight_version"])
            self.answer({"success": True})
        elif self.path == "/generate":
            self.generate(body)

    def generate(self, body: dict[str, object]) -> None:
        if "logprob_start_len" in body:
            self.answer(self.score(body))
            return
        entries, params = body["input_ids"], body["sampling_params"]
        with state:
            number, generation = counts["generate"], aborted[0]
            counts["generate"] += 1
            counts["now"] += len(entries)
            counts["most"] = max(counts["most"], counts["now"])
            counts["seeds"] += [p["sampling_seed"] for p in params]
            write_counts()
        if self.misbehave(number):
            return
        answer = [
            with_routing(complete(e, p, generation=generation), e, asked=body)
            for e, p in zip(entries, params, strict=True)
        ]
        with state:
            counts["now"] -= len(entries)
        self.answer(spoil(answer))

    def score(self, body: dict[str, object]) -> dict[str, object]:
        tokens, off = body["input_ids"], BEHAVIOUR.get("probe_off", 0.0)
        scored = [[None if i == 0 else -1.0 - off, t, None] for i, t in enumerate(tokens)]
        meta = {"weight_version": served["weight_version"], "input_token_logprobs": scored}
        return {"text": "", "output_ids": [], "meta_info": meta}

    def misbehave(self, number: int) -> bool:
        def due(name: str, times: float = float("inf")) -> bool:
            first = BEHAVIOUR.get(name)
            return first is not None and first <= number < first + times

        times = BEHAVIOUR.get("fail_times", float("inf"))
        if due("die_after"):
            print("RuntimeError: CUDA error: an illegal memory access", flush=True)
            os._exit(3)
        if due("hang_after"):
            time.sleep(600)
        if due("fail_after", times):
            with state:
                counts["now"] = 0
            self.answer({"error": {"message": "scheduler is unwell"}}, 500)
            return True
        if due("reset_after", times):
            with state:
                counts["now"] = 0
            if BEHAVIOUR.get("truncate"):  # the head, and half of what it announces
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b'[{"text": "')
                self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return True
        return False

    def answer(self, value: object, status: int = 200) -> None:
        data = json.dumps(value).encode()
        if BEHAVIOUR.get("bad", {}).get("json") and self.path == "/generate":
            data = data[: len(data) // 2]
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        try:
            self.wfile.write(data)
        except BrokenPipeError:
            pass  # the client left


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def handle_error(self, *args: object) -> None:
        pass  # connections that we broke ourselves


def write_counts() -> None:
    path = FOLDER / f"counts-{NUMBER}.json"
    path.with_suffix(".tmp").write_text(json.dumps(counts))
    path.with_suffix(".tmp").replace(path)


def main() -> None:
    if BEHAVIOUR.get("die_at_start"):
        print("ValueError: no such attention backend", flush=True)
        sys.exit(1)
    once = FOLDER / f"once-{NUMBER}"
    if BEHAVIOUR.get("port_taken") and not once.exists():
        once.touch()
        print(f"[Errno 98] error: address already in use: {ARGUMENTS['--port']}", flush=True)
        sys.exit(1)
    write_counts()
    print("ready to roll", flush=True)
    Server(("127.0.0.1", int(ARGUMENTS["--port"])), Handler).serve_forever()


main()
