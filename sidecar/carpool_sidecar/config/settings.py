"""The sidecar's configuration file: YAML or JSON, fully validated; errors name the field and the fix."""

from __future__ import annotations

import json
import re
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, field

from carpool.policy.durations import Duration, Quantity, format_seconds
from carpool.policy.parameters import Parameters
from carpool.policy.plain import Camel, PolicyError, from_plain, to_plain
from carpool.policy.spec import BatchingPolicy, PassThroughMode, TuningMode
from carpool_sidecar.config.hints import NO_TLS, explained
from carpool_sidecar.config.newer import without_unknown
from carpool_sidecar.protocols.limits import Limits

NO_ADDRESS = "is not host:port: write e.g. 127.0.0.1:8080"

EVERY_MODEL = "*"
"""In ``parameters``: those of every model that is not named itself."""


SILENCE, FORWARDED = 60.0, 600.0
"""Seconds; the latter is what OpenAI's clients wait for."""


class Upstream(Camel, frozen=True):
    """The model server beside this process: ``http://host:port`` or ``unix:/path``.

    ``timeout``: how long it may be silent. ``retry``: send a batch once more whose connection died before any byte of
    an answer; it may then be computed twice. ``ready``: the path that says whether the model can serve; unset, V2's is
    asked, and a server that does not know it is ready when it accepts connections.
    """

    url: str
    """`http://host:port` or `unix:/path`, without a path behind it. `localhost` is 127.0.0.1, and ::1 where that
    refuses connections."""
    timeout: Duration | None = None
    """Silence after which a call has failed, with 504. Unset: 1 min for inference and probes, 10 min for all else: a
    whole answer of a language model comes when its last token is there. Also the longest wait for a free connection:
    unset, 1 min."""
    connect_timeout: Duration = Duration(5.0)
    """For a new connection."""
    max_connections: Annotated[int, Meta(ge=1, le=65536)] = 256
    """Connections for inference at most; as many calls may wait for one, further ones get 503."""
    max_forwarded: Annotated[int, Meta(ge=1, le=65536)] = 1024
    """Connections for what is forwarded at most, open tunnels included; likewise."""
    retry: bool = False
    """Send a batch once more whose connection died before any byte of an answer; it may be computed twice."""
    ready: str | None = None
    """Path that says whether the model can serve: by 200 to 399, as for a kubelet. A 401, 403, 404, 405 or 501, or an
    answer that is no HTTP/1.1, or a connection that it closes, counts as ready: it accepts connections. Unset:
    `/v2/health/ready`, which a server need not know."""
    ask_timeout: Duration = Duration(5.0)
    """For the answer to a question of the sidecar's own: that path, the metadata of models, an engine's `/metrics`."""
    patience: Duration = Duration(0.0)
    """For how long a model that was ready may answer that path with other codes, or not answer, before the sidecar
    reports unready. One that refuses connections is unready at once."""
    count_queue: bool = True
    """While a gate admits token streams: add the requests that wait at it to those that wait in the engine, in the
    engine's `/metrics` on the data port, where an endpoint picker reads them. False: they pass unchanged."""

    def silence(self, *, forwarded: bool = False) -> float:
        """Seconds without a byte after which a call has failed; ``forwarded``: it is no inference, and no probe."""
        if self.timeout is not None:
            return float(self.timeout)
        return FORWARDED if forwarded else SILENCE

    @property
    def address(self) -> tuple[str, int, str | None]:
        """Host, port, and the path of a Unix socket or None."""
        parts = urlsplit(self.url)
        if parts.scheme == "unix":
            return "", 0, parts.path
        return parts.hostname or "", parts.port or 80, None


class Onnx(Camel, frozen=True):
    """A model file served in this process. ``threads`` compute one batch; 0 leaves the choice to the runtime."""

    path: str
    """The file. One whose first axis is fixed, or is no batch, is served without batching."""
    name: Annotated[str, Meta(pattern=r"^[^/?#\s]{1,253}$")] | None = None
    """Name it is served under; unset: the file's, without its suffix."""
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Threads of one run; 0 leaves the choice to the runtime."""
    device: Literal["Auto", "CPU", "CUDA"] = "Auto"
    """Auto takes CUDA where the runtime has it."""
    max_text: Quantity = Quantity(8 * 2**20)
    """JSON and binary BYTES of one call; longer gets 413, and a batch is halved. Numbers and texts become objects, at 5
    to 18 ms a MiB in which nothing else runs; other binary tensors cost nothing of that."""

    @property
    def model(self) -> str:
        """The name it is served under: the file's, without its suffix, where none is given."""
        return self.name or Path(self.path).stem


class Llm(Camel, frozen=True):
    """A language model served by an engine in processes of its own: OpenVINO GenAI, which batches step by step."""

    path: str
    """A `.gguf` file of an architecture and a quantization that OpenVINO GenAI reads (Llama, Qwen; F16, Q8_0, Q4_K_M
    and others), or a folder of an OpenVINO model. Needs the extra `llm`."""
    name: Annotated[str, Meta(pattern=r"^[^/?#\s]{1,253}$")] | None = None
    """Name it is served under; unset: the file's, without its suffix."""
    device: Annotated[str, Meta(min_length=1)] = "CPU"
    """Device of OpenVINO: `CPU`, `GPU`, `NPU`."""
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Threads that compute; 0 leaves the choice to the runtime."""
    context: Annotated[int, Meta(ge=1)] | None = None
    """Tokens of prompt and answer at most; unset: as many as the model takes."""
    kv_tokens: Annotated[int, Meta(ge=32)] | None = None
    """Size of the KV cache in tokens of all requests; unset: as many as fit in 1 GiB, and at least the context."""
    max_running: Annotated[int, Meta(ge=1, le=4096)] = 256
    """Requests that the engine computes at once at most. The gate of an SLO admits fewer."""
    max_batched_tokens: Annotated[int, Meta(ge=1)] = 256
    """Tokens of a step at most: those of answers first, then prompts, in pieces."""
    timeout: Duration = Duration(FORWARDED)
    """Silence after which a request has failed, with 504."""

    @property
    def model(self) -> str:
        """The name it is served under: the file's, without its suffix, where none is given."""
        return self.name or (Path(self.path).stem if self.path.endswith(".gguf") else Path(self.path).name)

    def argument(self) -> str:
        """Return it as JSON, as an argument of the engine's processes."""
        return msgspec.json.encode(to_plain(self)).decode()

    @classmethod
    def of_argument(cls, text: str) -> Llm:
        """Return what ``argument`` made text of; raises ``PolicyError``."""
        return from_plain(msgspec.json.decode(text), cls, what="llm")


class Shutdown(Camel, frozen=True):
    """``lame``: for how long requests are accepted after SIGTERM, while load balancers catch up; ``limit``: for all."""

    lame: Duration = Duration(5.0)
    """After SIGTERM: unready, but accepting, while load balancers catch up."""
    limit: Duration = Duration(30.0)
    """For all of the drain; what is unanswered then is cut off."""


MAX_ANSWER = Quantity(256 * 2**20)
"""Bytes of the largest answer, where neither it nor less room is configured."""


class Bodies(Camel, frozen=True):
    """How much is buffered: of one body, of one answer, and of all of them together."""

    max_request: Quantity = Quantity(64 * 2**20)
    """Larger ones are not batched: they are forwarded as they come. With `onnx`, 413."""
    max_buffered: Quantity = Quantity(512 * 2**20)
    """Everything that is held of requests and answers, until nobody needs it any more.

    What has no room gets 503. Or it is forwarded unbuffered, if its model is not batched now and nobody set
    `maxInFlight`.
    """
    max_answer: Quantity | None = None
    """Larger ones of the upstream become 502. With `onnx`, outputs of more bytes get 413, and a batch is halved. Unset:
    256Mi, or `maxBuffered` where that is less."""

    @property
    def largest_answer(self) -> Quantity:
        """Bytes of the largest answer that is buffered."""
        return min(MAX_ANSWER, self.max_buffered) if self.max_answer is None else self.max_answer


class Jobs(Camel, frozen=True):
    """Requests that nobody waits for: kept on disk, and run in the time that interactive ones leave."""

    path: str
    """The database: a file on a volume that outlives the container. No two sidecars share one."""
    keep_for: Duration = Duration(86400.0)
    """How long results and files are kept."""
    finish_within: Duration = Duration(86400.0)
    """A job that has no answer by then has failed. A batch says it itself (`completion_window`)."""
    max_bytes: Quantity = Quantity(2**30)
    """Bytes of requests, files and results in all; more is refused with 429, and no job is started while it is full."""
    max_jobs: Annotated[int, Meta(ge=1, le=10_000_000)] = 10_000
    """Jobs and batches that are not finished; one more is refused with 429. Lines of a batch do not count."""
    max_in_flight: Annotated[int, Meta(ge=1, le=4096)] = 16
    """Jobs with the model at once, at most."""
    max_request: Quantity = Quantity(4 * 2**20)
    """A job as it is submitted, or one line of a file. Reading one of 4 MiB takes the event loop some 4 ms."""
    authorization_file: str | None = None
    """File with the value of the Authorization header that jobs are sent with. Then only callers that send the same may
    use jobs."""


class SidecarConfig(Camel, frozen=True):
    """The configuration of a sidecar.

    ``listen`` and ``admin`` are ``host:port``; port 0 lets the system choose. With ``parameters`` (by model name, ``*``
    for the rest) nothing is tuned. ``generation`` counts versions of the file; left out, the process counts them.
    Signed changes are accepted if they name ``target`` and match a ``public_key`` (Ed25519, 64 hex digits each). They
    arrive by the admin port, or by the directory ``changes``.
    """

    policy: BatchingPolicy
    """What is promised, and how it is kept."""
    listen: str = "127.0.0.1:8080"
    """Data port, `host:port`; port 0 lets the system choose. The host `*` is every address, of IPv4 and of IPv6."""
    admin: str = "127.0.0.1:9090"
    """Admin port, likewise."""
    upstream: Upstream | None = None
    """The model server beside this process. Exactly one of this, `onnx` and `llm`."""
    onnx: Onnx | None = None
    """A model file served in this process."""
    llm: Llm | None = None
    """A language model served beside this process, by an engine that it starts."""
    parameters: dict[str, Parameters] = field(default_factory=dict)
    """Fixed parameters by model name, `*` for the rest. Where any are given nothing is tuned."""
    generation: Annotated[int, Meta(ge=1)] | None = None
    """Version of this file; unset: the process counts the versions it has seen."""
    api_key_file: str | None = None
    """File with the admin key; without one the admin port serves more than probes on loopback only."""
    public_key: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}(,[0-9a-fA-F]{64}){0,7}$")] | None = None
    """Ed25519 keys, each 64 hex digits, up to 8 with commas between them: changes and tickets signed with one of them
    are accepted. Needs the package `cryptography`."""
    target: str = ""
    """The target that a signed change or ticket has to name; an operator's is `namespace/Kind/name`."""
    changes: str | None = None
    """Directory that may hold a signed change (`change.json`, `change.sig`), watched: a mounted ConfigMap."""
    drain_key: Annotated[str, Meta(min_length=16)] | None = None
    """Secret that a preStop hook sends to `/drain` in `x-carpool-drain`, in place of the admin key."""
    bodies: Bodies = field(default_factory=Bodies)
    """How much is buffered: of one body, of one answer, and of all of them together."""
    limits: Limits = field(default_factory=Limits)
    """How much of a request, or of a batch's answer, is read; what is more is forwarded alone, as it came."""
    shutdown: Shutdown = field(default_factory=Shutdown)
    """How long a drain takes."""
    jobs: Jobs | None = None
    """Submit and poll, and OpenAI's files and batches; unset: off, and these paths are the model server's."""
    log: Literal["Debug", "Info", "Warning", "Error"] = "Info"
    """Least severe lines that are written."""

    def validate(self) -> SidecarConfig:
        """Check what types can't say, and return the configuration.

        Raises ``PolicyError`` that names the field.
        """
        try:
            self.policy.validate()
        except PolicyError as error:
            raise PolicyError(f"policy.{error.field}", str(error).partition(": ")[2]) from None
        for name, address in (("listen", self.listen), ("admin", self.admin)):
            if not is_address(address):
                raise PolicyError(name, f"{address!r} {NO_ADDRESS}")
        if self.listen == self.admin and not self.listen.endswith(":0"):
            raise PolicyError("admin", f"{self.admin} is that of listen, too: name another port")
        if sum(one is not None for one in (self.upstream, self.onnx, self.llm)) != 1:
            raise PolicyError(
                "upstream",
                "name exactly one of upstream (a server's URL), onnx (a file) and llm (a language model's file)",
            )
        if self.changes is not None and self.public_key is None:
            raise PolicyError(
                "changes", "a change counts only if it is signed: name the publicKey that it is signed by"
            )
        if self.shutdown.lame >= self.shutdown.limit:
            raise PolicyError(
                "shutdown.limit",
                f"{self.shutdown.limit} leaves no time after lame, {self.shutdown.lame}: raise it or lower lame",
            )
        for name, size in (("maxRequest", self.bodies.max_request), ("maxAnswer", self.bodies.largest_answer)):
            if self.bodies.max_buffered < size:
                raise PolicyError(
                    "bodies.maxBuffered",
                    f"{self.bodies.max_buffered} has no room for one body of bodies.{name}, {size}: "
                    "raise the former or lower the latter",
                )
        if self.jobs is not None and self.jobs.max_request > self.bodies.max_request:
            raise PolicyError(
                "jobs.maxRequest", f"{self.jobs.max_request} is more than bodies.maxRequest, {self.bodies.max_request}"
            )
        if self.jobs is not None and not self.jobs.path.strip():
            raise PolicyError("jobs.path", "is empty: name a file, e.g. /var/lib/carpool/jobs.db")
        _validate_timeouts(self)
        if self.upstream is not None:
            _validate_url(self.upstream.url)
            if self.upstream.ready is not None and not self.upstream.ready.startswith("/"):
                raise PolicyError("upstream.ready", f"{self.upstream.ready!r} is not a path: begin it with /")
        return self

    def validate_waits(self) -> None:
        """Check that fixed parameters do not hold requests until they are late.

        A file to be checked has to pass it. A sidecar that starts or takes a new version logs it only: with enough
        traffic batches fill before they have waited so long, and older versions ran such a file. Raises
        ``PolicyError``.
        """
        due = self.policy.slo.due
        for name, fixed in self.parameters.items():
            if fixed.max_wait >= due and fixed.max_batch > 1 and not fixed.pass_through:
                raise PolicyError(
                    f"parameters[{name}].maxWait",
                    f"{fixed.max_wait} is not below the SLO of {format_seconds(due)}: lower it",
                )

    @property
    def undecided(self) -> int:
        """Calls of a model at once, at most, until a tuner decides (``Batcher``); 0: what is set holds."""
        policy, limits = self.policy, self.policy.limits()
        fixed = self.parameters.get(EVERY_MODEL)
        # An operator writes the baseline first; then nothing is decided yet.
        chosen = fixed is not None and not (self.target and fixed == policy.start())
        # Under an operator, Hold freezes a fleet's present parameters, which first calls may have set.
        held = policy.tuning.mode is TuningMode.HOLD and not self.target
        held = held or policy.pass_through.mode is not PassThroughMode.AUTOMATIC
        if chosen or held or policy.baseline != Parameters() or limits.min_in_flight > 1:
            return 0
        return limits.max_in_flight

    def parameters_of(self, model: str) -> Parameters:
        """Return what a model starts with: fixed parameters, or what the policy starts it with."""
        fixed = self.parameters.get(model) or self.parameters.get(EVERY_MODEL)
        if fixed is not None:
            return fixed
        known = next((one for one in self.policy.models if one.name == model), None)
        return self.policy.start(known)


FIXED_AT_START = (
    "listen", "admin", "upstream", "onnx", "llm", "api_key_file", "public_key", "target", "changes", "drain_key",
    "bodies", "jobs",
)  # fmt: skip
"""Fields that a running process can't change."""


def is_address(text: str) -> bool:
    """Whether a text is ``host:port``; an IPv6 address may have brackets around it."""
    host, _, port = text.rpartition(":")
    if ":" in host:
        try:
            ip_address(host.strip("[]"))
        except ValueError:
            return False
    return bool(host) and port.isdigit() and int(port) <= 65535


def address_of(text: str) -> tuple[str, int]:
    """Read a validated ``host:port``; brackets around an IPv6 host are taken off."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def parse(text: str) -> SidecarConfig:
    """Read a file's content: YAML, which includes JSON.

    Raises ``PolicyError`` naming the field, or the line where it is no YAML.
    """
    return read(text).validate()


def parse_injected(text: str) -> tuple[SidecarConfig, list[str]]:
    """Read an injector's configuration, perhaps of a newer version; also return the fields that are ignored.

    If they were refused, a pod with a pinned sidecar image would never start. Raises ``PolicyError``.
    """
    plain, ignored = without_unknown(_plain(text), SidecarConfig)
    return _made(plain).validate(), ignored


def read(text: str) -> SidecarConfig:
    """Read a file's content without validating the whole: the caller may still change it.

    Raises ``PolicyError`` naming the field, or the line where it is no YAML.
    """
    return _made(_plain(text))


def _made(plain: Any) -> SidecarConfig:  # noqa: ANN401 - whatever the file holds
    try:
        return from_plain(plain, SidecarConfig, what="config")
    except PolicyError as error:
        raise explained(error, plain, SidecarConfig, {"policy": BatchingPolicy}) from None


def check_change(old: SidecarConfig, new: SidecarConfig) -> None:
    """Refuse what can't change while running, with a ``PolicyError`` naming the field."""
    for name in FIXED_AT_START:
        if getattr(old, name) != getattr(new, name):
            written = SidecarConfig.__struct_encode_fields__[SidecarConfig.__struct_fields__.index(name)]
            raise PolicyError(written, "can't change while the sidecar runs: restart it, or undo the change")


def _plain(text: str) -> Any:  # noqa: ANN401 - whatever the file holds
    if text.lstrip().startswith("{"):
        try:
            plain = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            pass  # YAML has braces too; its parser also names the line of an error
        else:
            if _has_each_key_once(text):
                return plain
            text = text.expandtabs()  # YAML allows no tabs between tokens, and JSON none inside strings
    import yaml  # noqa: PLC0415 - 0.9 MiB that a JSON file does without

    from carpool_sidecar.config import yaml_text  # noqa: PLC0415 - likewise

    try:
        # Through JSON and back: YAML's dates and sets are not supported, and keys become strings.
        plain = msgspec.json.decode(json.dumps(yaml_text.load(text), default=str, allow_nan=False))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # no YAML, or no JSON: .nan, date keys
        raise PolicyError("config", yaml_text.problem(error)) from None
    if not isinstance(plain, dict):
        raise PolicyError("config", "expected a mapping with at least `policy` and one of `upstream`, `onnx` and `llm`")
    return plain


def _has_each_key_once(text: str) -> bool:
    """Whether no key of the JSON text is repeated: decoders keep the last one silently."""
    counts: list[bool] = []
    json.loads(text, object_pairs_hook=lambda pairs: counts.append(len(dict(pairs)) == len(pairs)))
    return all(counts)


def _validate_timeouts(config: SidecarConfig) -> None:
    """Refuse times in which nothing can end: elsewhere 0 means that there is no limit. Only ``patience`` may be 0."""
    for name, part in (("upstream", config.upstream), ("llm", config.llm), ("jobs", config.jobs)):
        for member in () if part is None else msgspec.structs.fields(part):
            value = getattr(part, member.name)
            if isinstance(value, Duration) and value <= 0 and member.name != "patience":
                raise PolicyError(f"{name}.{member.encode_name}", "must be longer than 0s; drop it for the default")


def _validate_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme == "unix" and parts.path.startswith("/")
        good = good or (parts.scheme == "http" and bool(parts.hostname) and parts.path in {"", "/"} and not parts.query)
        good = good and not re.search(r"\s", url)
        _ = parts.port
    except ValueError:
        good = False
    if url.startswith("https:"):
        raise PolicyError("upstream.url", f"{url!r}: {NO_TLS}")
    if not good:
        raise PolicyError("upstream.url", f"{url!r}: write http://host:port or unix:/path, without a path after it")
