"""`pagedray serve`: Ray, Serve and the application in the foreground, from the first phase to a clean end.

`ray.serve` is imported where it is used, since that takes a while: `own_ray` does it while Ray's processes start.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import logging
import math
import shlex
import signal
import ssl
import time
from pathlib import Path
from typing import Any

import ray

from pagedray.deployments import own_ray
from pagedray.deployments.build import APP, Parts, application, num_gpus
from pagedray.deployments.directory import Directory
from pagedray.deployments.engine_watch import EngineWatch
from pagedray.deployments.log_tail import LogTail
from pagedray.deployments.phases import Phases
from pagedray.deployments.placement import PlacementWatch
from pagedray.deployments.proxy import Listener
from pagedray.engine.config import Config, EngineFacts, describe_level
from pagedray.engine.errors import ConfigError, EngineUnavailable
from pagedray.serving.access import first_key

DRAIN_S = 5.0  # how long streams may go on once the server is told to stop
LOOK_S = 0.1  # between looks at a start
STATUS_S = 1.0  # between looks at what Serve says of it
FOLLOW_S = 0.5  # between looks at the log
HTTP_TIMEOUT_S = 60.0
GROUP_SIGNAL_S = 0.5  # for Ray's processes to end of the signal that ended us
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AFTER_LOADING = "scheduler, ingress, HTTP proxy"


class Launch:
    """
    Args:
        config: the whole tree.
        listener: where HTTP is served.
        ray_address: a cluster to join; None: one of our own, which ends with this process.
        phases: where the start is shown.
        parts: what the application is made of.
    """

    def __init__(
        self,
        config: Config,
        listener: Listener,
        ray_address: str | None,
        phases: Phases,
        parts: Parts = Parts(),  # noqa: B008 (frozen)
    ):
        self._config, self._listener, self._ray_address, self._phases = config, listener, ray_address, phases
        self._parts = parts
        self.ray_is_gone = False  # our Ray was ended by somebody else
        self._logs: Path | None = None  # folder of Serve's log files, where this process can read them
        if ray_address is not None and config.server.ssl_certfile is not None:
            raise ConfigError(
                "ssl_certfile needs a Ray of our own: a cluster's Serve is told of certificates where it is first "
                "started (http_options.ssl_certfile, without HAProxy); or put a gateway with HTTPS in front"
            )
        self._key = first_key(config.server)

    def run(self) -> None:
        """Serve until Ctrl-C, SIGTERM, or the terminal's end.

        Raises:
            PagedrayError: the server can't start; the message says why.
        """
        heeded = [
            number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
        ]  # nohup ignores one
        before = {number: signal.signal(number, _stop) for number in heeded}
        try:
            self._start_ray()
            self._check_gpus()
            self._report(self._deploy())
            self._follow()
        except KeyboardInterrupt:
            with contextlib.suppress(OSError):  # the terminal may be gone
                self._phases.say("stopping; running requests get a few seconds to end")
        finally:
            self._end()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start_ray(self) -> None:
        self._phases.draw("Ray")
        if self._ray_address is None:
            self._logs = own_ray.start(self._config)
        elif not ray.is_initialized():  # it is where the cluster was asked for its devices
            ray.init(address=self._ray_address, logging_level=logging.ERROR)
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        signal.signal(signal.SIGTERM, _stop)  # Ray has put a handler of its own there
        self._phases.end("Ray")

    def _check_gpus(self) -> None:
        """A cluster of others may get more nodes; our own Ray has what it has, and engines would wait for ever."""
        if self._ray_address is not None:
            return
        wanted = num_gpus(self._config)
        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        if wanted > (found := resources.get("GPU", 0.0)):
            number = "max_replicas" if self._config.server.scales else "num_engine_replicas"
            remedy = (
                f"lower {number}, tensor_parallel_size or pipeline_parallel_size" if found else "use device auto or cpu"
            )
            raise ConfigError(f"device is cuda and {wanted:g} GPUs are needed, this machine has {found:g}; {remedy}")

    def _deploy(self) -> EngineFacts:
        """Start Serve and the application, and wait until it answers over HTTP."""
        from ray import serve

        from pagedray.deployments.serve_start import ServeStart

        self._phases.draw("Serve")
        starting = ServeStart(self._listener, "HeadOnly" if self._ray_address is None else "EveryNode")
        target = serve.RunTarget(target=application(self._config, self._parts, DRAIN_S), name=APP, route_prefix="/")
        starting.wait_for_controller()
        serve.run_many([target], wait_for_applications_running=False)
        self._phases.end("Serve")
        watch = EngineWatch(Directory(APP, self._config.model), self._phases)
        asked_s, placement = time.monotonic(), PlacementWatch(self._config)
        while (facts := watch.look()) is None:
            starting.check()
            if self._ray_address is not None and not watch.has_begun and (trouble := placement.look()) is not None:
                self._phases.say(f"not placed yet: {trouble}")
            asked_s = self._ask_serve(asked_s)
            time.sleep(LOOK_S)
        loaded_s = time.monotonic()
        while not self._answers():
            self._phases.draw(AFTER_LOADING)
            starting.check()
            asked_s = self._ask_serve(asked_s)
            if self._ray_address is not None and time.monotonic() - loaded_s > HTTP_TIMEOUT_S:
                remedy = "a cluster's Serve listens where it was first told to; give that as --host and --port"
                raise EngineUnavailable(f"the engine runs, but {self._url} does not answer: {remedy}")
            time.sleep(LOOK_S)
        self._phases.end(AFTER_LOADING)
        return facts

    def _ask_serve(self, asked_s: float) -> float:
        """Raise if Serve has given up on a replica, or will after some more attempts; when Serve was asked last."""
        now = time.monotonic()
        if now - asked_s < STATUS_S:
            return asked_s
        from ray import serve

        for name, deployment in serve.status().applications[APP].deployments.items():
            text, marker, error = deployment.message.partition("Error:\n")
            if marker or deployment.status == "DEPLOY_FAILED":
                reason = (error or text).strip().splitlines()[-1].removeprefix("pagedray.engine.errors.")
                where = f" (logs: {self._logs})" if self._logs else ""
                raise EngineUnavailable(f"{name} does not start: {reason}{where}")
        return now

    @property
    def _url(self) -> str:
        return self._listener.url

    def _answers(self) -> bool:
        try:
            return self._http("GET", "/health")[0] == 200
        except OSError:
            return False

    def _http(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        listener = self._listener
        host, port = listener.reachable_host, listener.port
        if listener.certfile is None:
            connection = http.client.HTTPConnection(host, port, timeout=HTTP_TIMEOUT_S)
        else:  # its certificate names whom clients ask, which this address needn't be
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection = http.client.HTTPSConnection(host, port, timeout=HTTP_TIMEOUT_S, context=context)
        with contextlib.closing(connection):
            text = None if body is None else json.dumps(body)
            headers = {"Content-Type": "application/json"}
            if self._key is not None:
                headers["Authorization"] = f"Bearer {self._key}".encode().decode("latin-1")  # sent as these very bytes
            connection.request(method, path, text, headers)
            response = connection.getresponse()
            return response.status, response.read()

    def _report(self, facts: EngineFacts) -> None:
        """Say what was started and how to use it."""
        path, body = self._example(facts)
        full = facts.num_blocks / blocks_per_sequence(facts)
        server = self._config.server
        secret = (
            "$PAGEDRAY_API_KEY" if server.api_key else f"$(grep -m 1 -v '^ *#' {shlex.quote(str(server.api_key_file))})"
        )
        key = "" if self._key is None else f' -H "Authorization: Bearer {secret}"'
        data = shlex.quote(json.dumps(body))
        curl = f"curl {self._url}{path}{key} -H 'Content-Type: application/json' -d {data}"
        say = self._phases.say
        say(f"model      {facts.model_names[0]}, {facts.dtype} on {facts.device}")
        if ranks := describe_ranks(self._config):
            say(f"engines    {ranks}")
        blocks = f"{facts.num_blocks:,} blocks of {facts.block_size} tokens, {int(full * facts.max_model_len):,} tokens"
        say(f"KV cache   {blocks}: {full:.1f} sequences of full length ({facts.max_model_len:,} tokens) at once")
        say(f"attention  {facts.attention_backend}: {facts.attention_backend_reason}")
        say(f"level      {describe_level(self._config, facts)}")
        if self._logs:
            say(f"logs       {self._logs}")
        if self._key is None and self._listener.host not in ("127.0.0.1", "localhost", "::1"):
            say("keys       none: whoever reaches this address may use it; see --api-key-file")
        say(f"ready in {self._phases.total_s:.1f} s: {self._url} ({self._listener})")
        say(f"  {curl}")

    def _example(self, facts: EngineFacts) -> tuple[str, dict[str, Any]]:
        """A request that works: the first one, which also proves the whole path, tells whether the model can chat."""
        model, num_tokens = facts.model_names[0], min(64, facts.max_model_len // 4)
        chat = {
            "model": model,
            "messages": [{"role": "user", "content": "Why is the sky blue?"}],
            "max_tokens": num_tokens,
        }
        self._phases.draw("first request")
        status, _ = self._http("POST", "/v1/chat/completions", {**chat, "max_tokens": 1})
        self._phases.end("first request")
        if status == 200:
            return "/v1/chat/completions", chat
        return "/v1/completions", {"model": model, "prompt": "The sky is blue because", "max_tokens": num_tokens}

    def _follow(self) -> None:
        """Show what engines log until a signal comes."""
        tail = LogTail(self._logs, APP) if self._logs else None
        while True:
            for line in tail.lines() if tail else ():
                self._phases.say(line)
            time.sleep(FOLLOW_S)

    def _end(self) -> None:
        """Leave nothing behind. The application goes first: HAProxy must live while its streams end."""
        from ray import serve
        from ray.serve.exceptions import RayServeException

        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the end of a terminal sends several
        if self._ray_address is None and ray.is_initialized() and _our_ray_died():
            self.ray_is_gone = True
            return
        unheard = io.StringIO()  # what Ray has to say of processes that end is no news now
        with contextlib.redirect_stdout(unheard), contextlib.redirect_stderr(unheard):
            with contextlib.suppress(KeyboardInterrupt):
                if ray.is_initialized():
                    with contextlib.suppress(RayServeException):  # Serve had not started
                        serve.delete(APP)
                    if self._ray_address is None:
                        serve.shutdown()  # type: ignore[no-untyped-call]
            for number in STOP_SIGNALS:  # an impatient one skipped the above; this takes no time
                signal.signal(number, signal.SIG_IGN)
            ray.shutdown()


def _our_ray_died() -> bool:
    """Whether the signal went to the whole process group: Ray's own processes have ended then, or will in a moment."""
    node: Any = ray._private.worker._global_node
    deadline_s = time.monotonic() + GROUP_SIGNAL_S
    while not (died := bool(node.dead_processes())) and time.monotonic() < deadline_s:
        time.sleep(LOOK_S)
    if died:
        node.kill_all_processes(check_alive=False)
    return died


def describe_ranks(config: Config) -> str:
    """How many engines of how many ranks there are; empty for one of one."""
    worker, server = config.worker, config.server
    fewest, most = server.fewest_engines, server.most_engines
    if worker.num_ranks == 1 and most == 1 and not server.scales:
        return ""
    number = str(fewest) if fewest == most else f"{fewest} to {most}, by load,"
    return (
        f"{number} of {worker.num_ranks} rank{'s' * (worker.num_ranks > 1)} "
        f"(tensor parallel {worker.tensor_parallel_size} x pipeline stages {worker.pipeline_parallel_size})"
    )


def blocks_per_sequence(facts: EngineFacts) -> int:
    """KV blocks that one sequence of full length holds; a sliding window holds what it can still see."""
    lengths = [min(window or facts.max_model_len, facts.max_model_len) for window in facts.block_groups]
    return sum(math.ceil(length / facts.block_size) for length in lengths)


def _stop(signum: int, frame: object) -> None:
    raise KeyboardInterrupt
