"""All settings: one frozen tree, validated once.

`load_config` merges, weakest first: defaults, those of a GPU, the optimization level's preset, a YAML mapping,
`PAGEDRAY_*` environment variables, explicit overrides (command-line flags). Field names are unique over all leaves, so
a flag is `--field-name` and a variable is `PAGEDRAY_FIELD_NAME`. It is the only reader of the environment; actors get
their leaf as an argument. What is learned at run time is `EngineFacts`, not a write into this tree.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_origin

import msgspec
import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from pagedray.engine.errors import ConfigError

EMBEDDED_MODEL = "smollm2-135m-instruct"
MAX_API_KEY = 1024  # characters

Device = Literal["cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

# What a GPU wants otherwise than a CPU: steps are short there, and wide ones cost little more than narrow ones.
GPU_DEFAULTS: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "run_ahead": 3}

# -O0 … -O3. Each is a preset of the fields it names; what is set explicitly wins.
OPTIMIZATION_LEVELS: dict[int, dict[str, Any]] = {
    0: {"run_ahead": 1, "cuda_graphs": False},  # one step at a time: to find faults
    1: {"cuda_graphs": False},  # the fastest start
    2: {},
    3: {  # least padding, a slower start
        "cuda_graph_sizes": (*range(1, 9), *range(12, 33, 4), *range(40, 257, 8)),
        "cuda_graph_token_sizes": (*range(32, 1025, 32), *range(1152, 2049, 128)),
    },
}


class Leaf(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


class ModelConfig(Leaf):
    model: str = Field(EMBEDDED_MODEL, description="Checkpoint directory, GGUF file, hub id, or the embedded default.")
    served_model_name: tuple[str, ...] = Field((), description="Names clients may use; default: the model as given.")
    revision: str | None = Field(None, description="Hub revision (branch, tag or commit).")
    dtype: Dtype = Field("auto", description="Type of weights and KV cache. auto: the checkpoint's, float32 for GGUF.")
    load_format: Literal["auto", "dummy"] = Field(
        "auto",
        description="dummy: random weights of the checkpoint's shapes, for benchmarks; it needs no weight files.",
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="Most tokens of one sequence, prompt and output. Default: the model's, capped by the KV cache.",
    )
    chat_template: str | None = Field(None, description="File with a Jinja chat template that replaces the model's.")

    @property
    def needs_weights(self) -> bool:
        return self.load_format != "dummy"


class CacheConfig(Leaf):
    block_size: int = Field(16, ge=1, le=1024, description="Tokens per KV block.")
    kv_cache_memory_bytes: int | None = Field(
        None,
        ge=1,
        description="Bytes of each rank's KV cache. Default: 1 GiB on a CPU; on a GPU what gpu_memory_utilization "
        "leaves.",
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of a GPU's memory for weights, activations and KV cache together."
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto", description="auto: the model's type. fp8: e4m3 with one scale, half the memory; needs a GPU."
    )
    num_kv_blocks: int | None = Field(
        None, ge=2, description="Blocks of the KV cache; overrides kv_cache_memory_bytes."
    )
    enable_prefix_caching: bool = Field(True, description="Share KV blocks of equal prompt beginnings.")


class SchedulerConfig(Leaf):
    max_num_seqs: int = Field(64, ge=1, le=4096, description="Most sequences computed in one step.")
    max_num_batched_tokens: int = Field(1024, ge=1, description="Most tokens computed in one step.")
    prefill_chunk_tokens: int | None = Field(
        None,
        ge=1,
        description="Most prompt tokens of one sequence in one step. Default: what the step's budget leaves.",
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field("fcfs", description="Order of the waiting queue.")
    max_queued_requests: int = Field(
        1024, ge=1, description="Waiting sequences beyond which requests get 429; n counts n."
    )
    max_queued_tokens: int = Field(4_000_000, ge=1, description="Waiting prompt tokens beyond which requests get 429.")
    run_ahead: int = Field(
        2,
        ge=1,
        le=64,
        description="Steps planned before the oldest one's tokens are known, itself included. Default with a pipeline: "
        "at least stages + 1; fewer leave stages idle.",
    )


class WorkerConfig(Leaf):
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the model runs; auto: on a GPU for each rank if there is any."
    )
    attention_backend: Literal["auto", "cpu", "torch", "triton", "flashinfer"] = Field(
        "auto", description="Attention kernel. A forced one that can't run fails at start."
    )
    optimization_level: int = Field(
        2, ge=0, le=3, description="Preset: 0 no run-ahead, 1 no CUDA graphs, 2 graphs, 3 graphs of more sizes."
    )
    cuda_graphs: bool = Field(True, description="Replay decode steps as captured CUDA graphs where the backend can.")
    cuda_graph_sizes: tuple[int, ...] = Field(
        (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256),
        description="Numbers of sequences to capture decode steps for; one in between is padded.",
    )
    cuda_graph_token_sizes: tuple[int, ...] = Field(
        (*range(64, 1025, 64), 1280, 1536, 1792, 2048),
        description="Numbers of tokens to capture steps with prompts for; larger ones run eagerly.",
    )
    cpu_threads: int | None = Field(None, ge=1, description="Threads of a CPU worker. Default: the cores it may use.")
    tensor_parallel_size: int = Field(
        1, ge=1, le=1024, description="GPUs of one node (on a CPU, processes) that share each layer: a stage's ranks."
    )
    pipeline_parallel_size: int = Field(
        1, ge=1, le=32, description="Stages that share the stack of layers, on one or more nodes."
    )
    pipeline_layers: tuple[int, ...] = Field(
        (), description="Layers of each pipeline stage. Default: even by cost, embedding and head included."
    )
    enable_expert_parallel: bool = Field(
        False, description="Whole experts on each of a stage's ranks, instead of a share of every expert."
    )

    @property
    def num_ranks(self) -> int:
        """Of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class FailureConfig(Leaf):
    step_timeout_s: float = Field(120.0, gt=0, description="A step that takes longer counts as a dead worker.")
    stall_threshold_s: float = Field(
        20.0, gt=0, description="With work and no finished step for so long, health is 503."
    )
    client_timeout_s: float = Field(
        20.0, gt=0, description="Requests of an ingress that has not polled for so long are aborted."
    )
    start_timeout_s: float = Field(600.0, gt=0, description="Longest start of an engine replica.")
    resubmit_timeout_s: float = Field(
        60.0, gt=0, description="How long an ingress waits for an engine to move requests to."
    )


class ServerConfig(Leaf):
    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for all. See api_key.")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port.")
    ssl_certfile: str | None = Field(
        None,
        description="PEM file of a certificate and its chain, for HTTPS. Serve's Python proxy serves it, not HAProxy.",
    )
    ssl_keyfile: str | None = Field(None, description="PEM file of the certificate's private key, not encrypted.")
    api_key: tuple[SecretStr, ...] = Field(
        (),
        exclude=True,  # so that no dump of the settings shows it
        description="Keys of which clients must send one. A flag is seen by all users of the machine: prefer "
        "api_key_file or PAGEDRAY_API_KEY. Default: no authentication.",
    )
    api_key_file: str | None = Field(
        None, description="File of more such keys, one a line, # begins a comment; read again when it changes."
    )
    cors_allow_origins: tuple[str, ...] = Field(
        (), description="Web origins whose pages may call the API from a browser; * for all. Default: none."
    )
    cors_allow_methods: tuple[str, ...] = Field(
        ("GET", "POST", "DELETE"), description="Methods that those pages may use; * for all."
    )
    cors_allow_headers: tuple[str, ...] = Field(("*",), description="Headers that those pages may send; * for all.")
    cors_allow_credentials: bool = Field(
        False, description="Let those pages send cookies; API keys need no such leave. Not with origins *."
    )
    num_ingress_replicas: int = Field(1, ge=1, description="Ingress processes.")
    num_engine_replicas: int = Field(1, ge=1, description="Engine replicas, each with its own copy of the model.")
    data_parallel_size: int | None = Field(None, ge=1, description="Another name of num_engine_replicas.")
    min_replicas: int | None = Field(
        None,
        ge=0,
        description="Fewest engine replicas where Serve scales them by load; 0: none while there is nothing to do, and "
        "the next request waits for one. Default: 1 with max_replicas, else no scaling.",
    )
    max_replicas: int | None = Field(
        None,
        ge=1,
        description="Most engine replicas where Serve scales them. Default: the larger of min_replicas and 1.",
    )
    target_load: float = Field(
        0.8,
        gt=0,
        le=1,
        description="Scaling: the load that an engine should have. 1: its batch (max_num_seqs) or its KV cache is "
        "full; what waits counts too.",
    )
    upscale_delay_s: float = Field(5.0, ge=0, description="Scaling: how long load must ask for more engines.")
    downscale_delay_s: float = Field(300.0, ge=0, description="Scaling: how long load must ask for fewer engines.")
    routing_policy: Literal["prefix", "least_loaded", "round_robin"] = Field(
        "prefix",
        description="Which engine gets a request. prefix: the one that holds most of the prompt, within a bound.",
    )
    routing_imbalance_factor: float = Field(
        2.0,
        ge=1,
        description="For its prefix or session no engine gets a request that puts it above so many times the load that "
        "the least loaded one would have with it.",
    )
    haproxy: bool = Field(True, description="Use Serve's HAProxy mode; off: Serve's Python proxy.")
    max_body_bytes: int = Field(16 * 2**20, ge=1024, description="Largest request body; beyond it 413.")
    max_json_depth: int = Field(
        128, ge=8, le=256, description="Most arrays and objects within each other in a request body; beyond it 400."
    )
    max_header_bytes: int = Field(
        32 * 2**10, ge=1024, description="Names and values of a request's headers together; beyond it 431."
    )
    client_stall_timeout_s: float = Field(
        60.0,
        gt=0,
        description="An answer that has waited for its client to read for so long is given up. Serve's Python proxy "
        "takes answers whole and hides slow clients; HAProxy doesn't.",
    )
    log_stats_interval_s: float = Field(10.0, gt=0, description="Seconds between throughput lines while there is work.")

    @field_validator("api_key")
    @classmethod
    def _check_keys(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for i, key in enumerate(keys):
            text = key.get_secret_value()
            if not text or text != text.strip() or not text.isprintable() or len(text) > MAX_API_KEY:
                raise ValueError(
                    f"key {i + 1} of {len(keys)} can't be used: one has 1 to {MAX_API_KEY} printable characters, "
                    "and no blank at its ends"
                )
        return keys

    @field_validator("cors_allow_origins")
    @classmethod
    def _check_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
                raise ValueError(
                    f"{origin!r} is no web origin; one is scheme://host or scheme://host:port, without a path"
                )
        return origins

    @property
    def fewest_engines(self) -> int:
        """Engine replicas that there always are."""
        if self.min_replicas is None and self.max_replicas is None:
            return self.num_engine_replicas
        return 1 if self.min_replicas is None else self.min_replicas

    @property
    def most_engines(self) -> int:
        if self.min_replicas is None and self.max_replicas is None:
            return self.num_engine_replicas
        return max(self.fewest_engines, 1) if self.max_replicas is None else self.max_replicas

    @property
    def scales(self) -> bool:
        """Whether the number of engines follows the load."""
        return self.most_engines > self.fewest_engines


class ApiConfig(Leaf):
    """What the HTTP API does with a model's words."""

    tool_call_parser: str = Field(
        "auto", description="How the model writes tool calls; auto: by its chat template. A wrong name lists them all."
    )
    reasoning_parser: str = Field(
        "auto", description="How the model marks its reasoning; auto: by its chat template; none: it doesn't."
    )
    grammar_timeout_s: float = Field(
        5.0, gt=0, le=60, description="Longest compilation of a grammar or JSON schema; beyond it 400."
    )
    max_stored_responses: int = Field(
        1000, ge=0, description="Answers of the Responses API that are kept for later turns; 0: none."
    )
    max_stored_bytes: int = Field(256 * 2**20, ge=0, description="Bytes that kept answers may take together.")
    stored_response_ttl_s: float = Field(3600.0, gt=0, description="How long an answer is kept.")


class Config(Leaf):
    """The whole tree. Cross-field checks live here and name both fields."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    worker: WorkerConfig = WorkerConfig()
    failure: FailureConfig = FailureConfig()
    server: ServerConfig = ServerConfig()
    api: ApiConfig = ApiConfig()

    @model_validator(mode="after")
    def _check(self) -> Config:
        sched, worker = self.scheduler, self.worker
        if sched.max_num_batched_tokens < sched.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({sched.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({sched.max_num_seqs}): each running sequence needs one token a step"
            )
        for name in ("cuda_graph_sizes", "cuda_graph_token_sizes"):
            if any(size < 1 for size in getattr(worker, name)):
                raise ValueError(f"{name} must be positive, got {min(getattr(worker, name))}")
        if worker.device == "cpu":
            if self.model.dtype == "float16":
                raise ValueError("dtype float16 needs a GPU, and device is cpu; use bfloat16 or float32")
            if self.cache.kv_cache_dtype == "fp8":
                raise ValueError("kv_cache_dtype fp8 needs a GPU, and device is cpu; use auto")
        stages, layers = worker.pipeline_parallel_size, worker.pipeline_layers
        if layers and (len(layers) != stages or min(layers) < 1):
            raise ValueError(
                f"pipeline_layers ({', '.join(map(str, layers))}) must be one positive number for each of the "
                f"pipeline_parallel_size ({stages}) stages"
            )
        if worker.enable_expert_parallel and worker.tensor_parallel_size == 1:
            raise ValueError(
                "enable_expert_parallel spreads experts over the ranks of a stage, and tensor_parallel_size is 1; "
                "raise that or leave enable_expert_parallel off"
            )
        server = self.server
        if server.data_parallel_size not in (None, server.num_engine_replicas):
            raise ValueError(
                f"data_parallel_size ({server.data_parallel_size}) and num_engine_replicas "
                f"({server.num_engine_replicas}) are two names of one number; give one of them"
            )
        fixed = "num_engine_replicas" if server.data_parallel_size is None else "data_parallel_size"
        is_fixed = server.data_parallel_size is not None or "num_engine_replicas" in server.model_fields_set
        for name in ("min_replicas", "max_replicas"):
            if is_fixed and getattr(server, name) is not None:
                raise ValueError(
                    f"{fixed} ({server.num_engine_replicas}) fixes the number of engines, and {name} "
                    f"({getattr(server, name)}) lets it follow the load; give one of the two"
                )
        if (server.ssl_certfile is None) != (server.ssl_keyfile is None):
            given, missing = ("ssl_certfile", "ssl_keyfile")[:: 1 if server.ssl_certfile else -1]
            raise ValueError(
                f"{given} ({getattr(server, given)}) needs {missing}: HTTPS takes a certificate and its key"
            )
        if server.cors_allow_credentials and "*" in server.cors_allow_origins:
            raise ValueError(
                "cors_allow_credentials with cors_allow_origins * would lend every page the user's cookies; "
                "name the origins, or leave credentials off"
            )
        if server.most_engines < server.fewest_engines:
            raise ValueError(
                f"max_replicas ({server.max_replicas}) must be at least min_replicas ({server.fewest_engines})"
            )
        return self

    def without_keys(self) -> Config:
        """The same for those who need not know clients' API keys."""
        return self.model_copy(update={"server": self.server.model_copy(update={"api_key": ()})})


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine learned while it started; everything an ingress needs to check requests against it."""

    model_names: tuple[str, ...]  # names clients may use, the first is canonical
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int  # without the null block
    block_groups: tuple[int | None, ...]  # sliding window of each block group, None: full attention
    kv_capacity_tokens: int  # the most tokens one sequence alone can hold
    eos_ids: tuple[int, ...]
    enable_prefix_caching: bool
    dtype: str
    device: str
    attention_backend: str
    attention_backend_reason: str
    num_graphs: int = 0  # captured steps
    engine_id: str = ""  # new for each start of an engine
    start_phases: tuple[tuple[str, float], ...] = ()  # name, seconds, in order


def describe_level(config: Config, facts: EngineFacts) -> str:
    """The optimization level, and what it and explicit settings came to."""
    ahead, stages = config.scheduler.run_ahead, config.worker.pipeline_parallel_size
    text = f"-O{config.worker.optimization_level}: {ahead} step{'s' * (ahead > 1)} in flight"
    if stages > 1 and ahead <= stages:
        text += f" (run_ahead {stages + 1} would keep all {stages} stages busy)"
    if facts.device == "cpu":
        return text
    return f"{text}, {facts.num_graphs or 'no'} CUDA graphs"


def leaves() -> dict[str, type[Leaf]]:
    """Leaf name → its class, in the order of the tree."""
    return {name: field.annotation for name, field in Config.model_fields.items() if isinstance(field.annotation, type)}


def load_config(
    tree: Mapping[str, Any] | str | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    auto_device: Callable[[], Device] = lambda: "cpu",
) -> Config:
    """Build the configuration. Its `device` is never "auto".

    Args:
        tree: nested mapping {leaf: {field: value}}, or its YAML text; flat {field: value} pairs may be mixed in.
        overrides: flat {field: value}, strongest; None values are skipped.
        environ: environment variables, of which `PAGEDRAY_FIELD_NAME` are read; lists are separated by commas.
        auto_device: what "auto" stands for; asked only then.

    Raises:
        ConfigError: unknown names, bad values, or values that don't go together.
    """
    owner = {field: leaf for leaf, cls in leaves().items() for field in cls.model_fields}
    merged: dict[str, dict[str, Any]] = {leaf: {} for leaf in leaves()}

    def put(field: str, value: Any, origin: str) -> None:
        if field not in owner:
            raise ConfigError(f"{origin}: unknown setting {field!r}; known: {', '.join(sorted(owner))}")
        if isinstance(value, str) and get_origin(leaves()[owner[field]].model_fields[field].annotation) is tuple:
            value = tuple(part.strip() for part in value.split(","))
        merged[owner[field]][field] = value

    try:
        given = yaml.safe_load(tree) if isinstance(tree, str) else tree
    except (yaml.YAMLError, ValueError) as error:  # a date that there isn't is a ValueError
        raise ConfigError(f"the configuration is not YAML: {error}") from error
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"the configuration must be a mapping, got {type(given).__name__}")
    for name, value in (given or {}).items():
        if isinstance(value, Mapping) and name in merged:
            for field, inner in value.items():
                if owner.get(field) != name:
                    known = ", ".join(sorted(leaves()[name].model_fields))
                    raise ConfigError(f"{name}: unknown setting {field!r}; known: {known}")
                put(field, inner, name)
        else:
            put(name, value, "configuration")
    for variable, text in (environ or {}).items():
        field = variable.removeprefix("PAGEDRAY_").lower()
        if variable == "PAGEDRAY_API_KEY" and not text.strip():
            raise ConfigError("PAGEDRAY_API_KEY is set and empty; unset it to serve without authentication")
        if not variable.startswith("PAGEDRAY_") or not text.strip() or text.startswith(("tcp://", "udp://", "sctp://")):
            continue  # beside a Kubernetes service of that name there is PAGEDRAY_PORT=tcp://…
        if field in owner:
            put(field, None if text.strip().lower() in ("null", "none") else text, variable)
        elif near := difflib.get_close_matches(field, owner, n=1, cutoff=0.75):
            raise ConfigError(f"{variable}: unknown setting; did you mean PAGEDRAY_{near[0].upper()}?")
    for field, value in (overrides or {}).items():
        if value is not None:
            put(field, value, "--" + field.replace("_", "-"))
    worker = merged["worker"]
    if worker.get("device", "auto") == "auto":
        worker["device"] = auto_device()
    if merged["server"].get("data_parallel_size") is not None:
        merged["server"].setdefault("num_engine_replicas", merged["server"]["data_parallel_size"])
    try:
        for field, value in _defaults(worker).items():
            merged[owner[field]].setdefault(field, value)
        return Config.model_validate(merged)
    except ValidationError as error:
        lines = [f"{'.'.join(str(p) for p in e['loc']) or 'configuration'}: {e['msg']}" for e in error.errors()]
        raise ConfigError("; ".join(lines)) from error


def _defaults(worker: Mapping[str, Any]) -> dict[str, Any]:
    """What these settings want otherwise than the fields' own defaults."""
    defaults = dict(GPU_DEFAULTS) if worker["device"] == "cuda" else {}
    stages = _value(worker, "pipeline_parallel_size")
    if stages > 1:
        defaults["run_ahead"] = max(stages + 1, defaults.get("run_ahead", 0))
    return defaults | OPTIMIZATION_LEVELS[_value(worker, "optimization_level")]


def _value(worker: Mapping[str, Any], name: str) -> int:
    """Of a field among these settings, however it is spelt; the default for one that validation will refuse."""
    default: int = WorkerConfig.model_fields[name].default
    try:
        return int(getattr(WorkerConfig.model_validate({name: worker.get(name, default)}), name))
    except ValidationError:
        return default
