"""What both scripts share: flags, the start of a rank, its role, and how it ends when something fails.

    rank 0      builds decoders over the pipeline and hands them to the script
    the others  serve a stage until rank 0 stops them

Exit codes: 0; 2 for what the user can mend, said once a machine; 1 when a rank failed or was lost, said by every
survivor with the reason of the first one; 141 when nobody reads the output any more.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
import transformers
from transformers import PreTrainedConfig

from decoding.cache import StageCache
from decoding.compiled import NotCompiled
from decoding.nodes import CachePlan
from decoding.sampling import Sampling
from decoding.stage import Stage
from distributed_inference.addresses import public_addresses
from distributed_inference.connections import LostRank
from distributed_inference.emulation import (
    Emulation,
    Faithfulness,
    PacedDrafter,
    add_emulation_arguments,
    exact_sleeps,
)
from distributed_inference.layout import DRAFT_RANK, LM_HEAD_PLACES, Layout, parse_gpus
from distributed_inference.remote import Pipeline, RemoteExecutor
from distributed_inference.stages import Setup, StageServer
from distributed_inference.startup import (
    SHOWN_HASH,
    Environment,
    Group,
    Refused,
    check_same,
    code_version,
    short_sha256,
)
from distributed_inference.watch import Verdict, Watch
from evaluation.files import checkpoint_labels
from evaluation.plan import target_of_heads
from loading.checkpoint_files import checkpoint_file
from loading.flags import COUNT, NATURAL, bounded, resolve_dtype
from loading.head_values import parse_stage_layers
from loading.target_config import load_target_config
from loading.target_files import check_compiled, check_target_weights, target_fingerprint, tokenizer_fingerprint
from pipeline_inference import (
    Decoder,
    Drafter,
    SPDDrafter,
    add_decoding_arguments,
    add_model_arguments,
    check_attention,
    check_length,
    check_limits,
    check_seed,
)
from pipeline_model import (
    HeadConfig,
    SpeculationHead,
    Target,
    load_head,
    read_head,
    split_layers,
)
from script_utils import (
    FileSwitch,
    Parser,
    check_output_file,
    first_line,
    no_loading_bar,
    quiet_libraries,
    reader_is_gone,
    show_what_can_be_shown,
)

SECONDS = bounded(float, 0.1, 1e6)  # of a timeout: none that ends every run, none that never ends
USER_PATIENCE = timedelta(days=10)  # between two questions of somebody who types them
MEETING_SPARE = 5.0  # seconds beyond --meet_timeout_sec in which whoever knows more can say so
CLOSED_PIPE = 141  # exit code when nobody reads the output any more, as of all scripts; nothing is said
OUTPUT_SECONDS = 2.0  # a process that ends waits so long for whoever reads what it prints


class RankParser(Parser):
    """A parser whose errors, which are the same on every rank, are printed once a machine."""

    def error(self, message: str) -> NoReturn:
        if not speaks_for_machine():
            self.exit(2)
        super().error(message)


def speaks_for_machine() -> bool:
    """Whether this is the rank that says what every rank could say."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def add_arguments(parser: Parser, nargs: int | str = 1) -> None:
    """The flags of a pipeline; what to decode is the script's.

    nargs: as argparse has it, of --spec_head_ckpt, --num_stages, --temperature and --draft_top_k, which are lists.
    """
    model = add_model_arguments(parser)
    model.add_argument("--spec_head_ckpt", nargs=nargs, required=True, help="head checkpoint, a file or a folder")
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument("--num_stages", type=int, nargs=nargs, help="n, for a head trained for several; unset: its own")
    ranks.add_argument("--stage_layers", help='another split than the head\'s, "8;22": exact, but fewer drafts fit')
    ranks.add_argument("--colocate_draft", action="store_true", help="rank 0 runs the first stage, too: n ranks")
    ranks.add_argument("--rank_gpus", type=str, help='GPU of each rank: "0,1,2", or cpu; unset: LOCAL_RANK, or CPU')
    ranks.add_argument("--dist_backend", choices=["nccl", "gloo"], help="payloads; unset: nccl on GPUs, gloo on CPUs")
    ranks.add_argument("--lm_head", default="draft", choices=LM_HEAD_PLACES, help="rank that computes the logits")
    ranks.add_argument("--meet_timeout_sec", type=SECONDS, default=120, help="for finding each other, and connecting")
    ranks.add_argument("--load_timeout_sec", type=SECONDS, default=1800, help="for loading, and between two prompts")
    ranks.add_argument("--prefill_timeout_sec", type=SECONDS, default=300, help="for a message while a prompt is run")
    ranks.add_argument("--decode_timeout_sec", type=SECONDS, default=60, help="for a message in a cycle")
    ranks.add_argument("--threads", type=COUNT, default=1, help="CPU threads of a rank")
    add_decoding_arguments(parser, nargs)
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument("--warmup_iters", type=NATURAL, default=1, help="unrecorded generations before the first")
    measuring.add_argument("--warmup_new_tokens", type=NATURAL, help="new tokens of each; 0: no warm-up; unset: 2 n")
    measuring.add_argument(
        "--profile_timing",
        action=FileSwitch,
        file="profile_timing.json",
        help="print where a cycle's time goes, and write it; without FILE: profile_timing.json",
    )
    measuring.add_argument("--trace", metavar="FILE", help="write a Chrome/Perfetto trace of all ranks")
    add_emulation_arguments(parser)


class Checked:
    """What one rank knows before anything is loaded. ValueError for everything that cannot work."""

    def __init__(self, args: argparse.Namespace, environment: Environment):
        self.max_new_tokens, self.width = args.max_new_tokens, max(args.draft_top_k)
        for temperature in args.temperature:
            Sampling(temperature, args.top_k, args.top_p)
        for width in args.draft_top_k:
            check_limits(args.max_new_tokens, width)
            check_attention(args.attn_implementation, width, args.compile)
        check_seed(args.seed)
        if environment.rank == DRAFT_RANK:  # others may lie on machines without that folder
            check_output_file("--profile_timing", args.profile_timing)
            check_output_file("--trace", args.trace)
        self.heads, self.base_model_path, self.target_config = read_heads(args)
        check_target_weights(self.base_model_path, self.target_config)
        self.anchors = tuple(sorted({anchor for head in self.heads.values() for anchor in head.anchors}))
        sizes = shared_split(share_ranks(args, self.heads, self.target_config))
        self.layout = Layout(sizes, args.colocate_draft, args.lm_head)
        check_world(self.layout, environment.world_size)
        self.device, self.backend = choose_device(args, environment)
        self.emulation = Emulation.of(args, sizes)
        self.emulation.check(self.layout, self.device)
        check_compiled(args.compile, self.target_config, None, self.device)
        self.dtype = resolve_dtype(args.dtype, self.device)

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """ValueError for a prompt that is too long for the target."""
        check_length(len(prompt), self.max_new_tokens, self.target_config.max_position_embeddings)

    def facts(self, args: argparse.Namespace) -> dict[str, str]:
        """What must be the same on every rank."""
        return {
            "number of stages": str(self.layout.num_stages),
            "stage layers": _listed(self.layout.stage_sizes),
            "ranks": f"{self.layout.world_size}, {'co-located' if self.layout.colocated else 'separate'} draft",
            "lm_head": self.layout.lm_head,
            "draft_top_k": " ".join(map(str, args.draft_top_k)),
            "backend": self.backend,
            "compile": str(args.compile),
            "dtype": str(self.dtype).removeprefix("torch."),
            "hidden size": str(self.target_config.hidden_size),
            "vocabulary": str(self.target_config.vocab_size),
            "attention kernels": args.attn_implementation,
            "target checksum": target_fingerprint(self.base_model_path)[-SHOWN_HASH:],
            "tokenizer checksum": tokenizer_fingerprint(self.base_model_path)[-SHOWN_HASH:],
            "head checksum": " ".join(short_sha256(checkpoint_file(path)) for path in self.heads),
            "code version": code_version(),
            "torch and transformers": f"{torch.__version__} and {transformers.__version__}",
        }


def read_heads(args: argparse.Namespace) -> tuple[dict[str, HeadConfig], str, PreTrainedConfig]:
    """The heads by path, the target's path and its configuration; no weight is read.

    ValueError for a head given twice, one that does not fit the target, and as `target_of_heads`.
    """
    checkpoint_labels(args.spec_head_ckpt)
    target = args.base_model_path or target_of_heads(args.spec_head_ckpt, HeadConfig)
    config = load_target_config(target, args.trust_remote_code)
    return {path: read_head(path, config, mapped=True).config for path in args.spec_head_ckpt}, target, config


class Share(NamedTuple):
    """Heads that the same ranks can serve."""

    stage_sizes: tuple[int, ...]  # layers of each stage
    num_stages: int | None  # as --num_stages asks for it
    heads: list[str]  # paths


def share_ranks(
    args: argparse.Namespace, heads: Mapping[str, HeadConfig], target_config: PreTrainedConfig
) -> list[Share]:
    """Group heads, for every n that --num_stages gives, by the split of the target that they need."""
    shares: dict[tuple, Share] = {}
    for num_stages in dict.fromkeys(args.num_stages or [None]):
        for path, head in heads.items():
            try:
                sizes = stage_sizes(args, head, target_config, num_stages)
            except ValueError as error:
                raise ValueError(f"{path!r}: {error}") from None
            shares.setdefault((sizes, num_stages), Share(sizes, num_stages, [])).heads.append(path)
    return list(shares.values())


def shared_split(shares: Sequence[Share]) -> tuple[int, ...]:
    """Layers of each stage. ValueError when these ranks cannot serve all heads."""
    first, *others = shares
    for other in others:
        ours, theirs = (f"{share.heads[0]!r} has stages {_listed(share.stage_sizes)}" for share in (first, other))
        raise ValueError(
            f"{ours}, but {theirs}: the ranks that torchrun starts have one split; start this script with python "
            "instead, and it starts the ranks of each"
        )
    return first.stage_sizes


def stage_sizes(
    args: argparse.Namespace, head: HeadConfig, target_config: PreTrainedConfig, num_stages: int | None
) -> tuple[int, ...]:
    """Layers of each stage: the head's split, unless --stage_layers gives another one."""
    layers = target_config.num_hidden_layers
    override = parse_stage_layers(args.stage_layers)
    if override is None:
        return head.split(layers, num_stages)
    if num_stages not in (None, len(override)):
        raise ValueError(f"--num_stages is {num_stages}, but --stage_layers lists {len(override)}: drop one")
    return split_layers(layers, len(override), override)


def _listed(sizes: Sequence[int]) -> str:
    return ";".join(map(str, sizes))


def check_world(layout: Layout, world_size: int) -> None:
    if layout.world_size < 2:
        raise ValueError("one stage beside the draft is one process: use pipeline_inference.py")
    if layout.world_size != world_size:
        kind = "a co-located draft" if layout.colocated else "a draft rank"
        raise ValueError(
            f"{world_size} ranks were started, but {layout.num_stages} stages with {kind} need {layout.world_size}: "
            f"torchrun --nproc_per_node={layout.world_size}"
        )


def choose_device(args: argparse.Namespace, environment: Environment) -> tuple[torch.device, str]:
    """This rank's device, and the backend of payloads. ValueError for GPUs that are not there or cannot be shared."""
    on_cpu = (args.rank_gpus or "").strip() == "cpu"
    gpus = None if on_cpu else parse_gpus(args.rank_gpus, environment.world_size)
    count = torch.cuda.device_count()
    if on_cpu or (gpus is None and not count):
        if args.dist_backend == "nccl":
            raise ValueError("--dist_backend nccl needs GPUs: use gloo on CPUs")
        return torch.device("cpu"), "gloo"
    index = environment.local_rank if gpus is None else gpus[environment.rank]
    if index >= count:
        way = "name others with --rank_gpus" if count else "--rank_gpus cpu runs on the CPU"
        raise ValueError(f"rank {environment.rank} wants GPU {index}, but this machine has {count}: {way}")
    backend = args.dist_backend or "nccl"
    if (
        backend == "nccl"
        and gpus is not None
        and environment.world_size == int(os.environ.get("LOCAL_WORLD_SIZE", environment.world_size))
    ):
        shared = sorted({gpu for gpu in gpus if gpus.count(gpu) > 1})
        if shared:
            raise ValueError(f"--rank_gpus gives GPU {shared[0]} to several ranks: that needs --dist_backend gloo")
    return torch.device("cuda", index), backend


class Lead:
    """The draft rank's side of a started pipeline: what the scripts decode with."""

    def __init__(self, args: argparse.Namespace, checked: Checked, pipeline: Pipeline, head: SpeculationHead):
        """head: the first one of --spec_head_ckpt; the others are loaded when they are asked for."""
        self.args, self.checked, self.layout, self.target = args, checked, checked.layout, pipeline.target
        self._pipeline, self._head = pipeline, (args.spec_head_ckpt[0], head)
        self.emulation = Emulation.of(args, self.layout.stage_sizes)
        self.faithfulness = Faithfulness(self.emulation)
        # Of the target on the same stages, without drafts.
        self.target_executor = RemoteExecutor(pipeline, pace=self.emulation.alone)

    def speculative(self, path: str, sampling: Sampling, width: int) -> Decoder:
        """A decoder with one of the heads. The head of another path is let go before this one is loaded."""
        if self._head is None or self._head[0] != path:
            self._head = None
            self._head = path, load_head(path, self.target)
        head, lag = self._head[1], self.args.verify_lag
        return self._decoder(
            RemoteExecutor(self._pipeline, head.config.anchors, verify_lag=lag, pace=self.emulation.pipeline),
            self._drafter(head),
            sampling,
            verify_lag=lag,
            draft_top_k=width,
            verify_drafts=self.args.verify,
        )

    def _drafter(self, head: SpeculationHead) -> SPDDrafter:
        settings = head, self.target, self.layout.stage_sizes, self.args.use_deepest
        if not self.emulation:
            return SPDDrafter(*settings, compiled=self.args.compile)
        seconds = self.emulation.head_seconds(head.config.num_spec_layers)
        return PacedDrafter(seconds, *settings, compiled=self.args.compile)

    def alone(self, sampling: Sampling) -> Decoder:
        """A decoder of the target on the same stages, without drafts."""
        return self._decoder(self.target_executor, None, sampling)

    def _decoder(self, executor: RemoteExecutor, drafter: Drafter | None, sampling: Sampling, **more: Any) -> Decoder:
        return Decoder(
            executor,
            drafter,
            sampling=sampling,
            eos_token_ids=self.target.eos_token_ids,
            max_positions=self.target.config.max_position_embeddings,
            seed=self.args.seed,
            keep_trace=self.args.profile_timing is not None or self.args.trace is not None,
            **more,
        )

    def warm_up(self, prompt: Sequence[int], decoder: Decoder) -> None:
        """Unrecorded generations, so that no time has allocations and kernel choices in it."""
        wanted = self.args.warmup_new_tokens
        count = min(self.args.max_new_tokens, 2 * self.layout.num_stages if wanted is None else wanted)
        for _ in range(self.args.warmup_iters if count else 0):
            decoder.generate(prompt, count)


class Script(Protocol):
    """What a script does with a pipeline. Only the draft rank's instance is asked for anything else than a flag."""

    interactive: bool  # whether generations begin when somebody asks for them, which may take any time

    def __init__(self, args: argparse.Namespace): ...

    def prepare(self, checked: Checked) -> None:
        """Read prompts, check output paths, before any weights are loaded. ValueError for what cannot work."""

    def claim(self) -> AbstractContextManager[None]:
        """Keeps other processes from what this one will write, until it ends. ValueError when one writes it already."""

    def run(self, lead: Lead) -> int:
        """Decode. Returns the exit code."""

    def interrupted(self) -> bool:
        """Ctrl-C, in another thread than `run`: True where it stops something less than the run."""

    def last_words(self) -> None:
        """The run ends here, by no fault of this rank: print what there is."""


def run_rank(script_class: type[Script], parser: RankParser) -> NoReturn:
    """Parse, find the other ranks, load, play this rank's role, exit."""
    show_what_can_be_shown()
    args = parser.parse_args()
    quiet_libraries()
    RankProcess(script_class(args), args, parser).run()


class RankProcess:
    """This process as one rank, from its start to its exit code."""

    def __init__(self, script: Script, args: argparse.Namespace, parser: RankParser):
        self.script, self.args, self.parser = script, args, parser
        self._watch: Watch | None = None  # from when this process knows its rank
        self._describe: Callable[[int], str] = "rank {}".format  # until the layout is known
        self._ending = threading.Lock()
        self._claims = ExitStack()  # of the draft rank's script

    def run(self) -> NoReturn:
        self._watch_signals()
        code, message, verdict = 0, None, None
        try:
            code = self._play(self._meet())
        except ValueError as error:
            code, message = 2, self.parser.as_typed(str(error))
            if self._watch is not None and not isinstance(error, Refused):
                verdict = Verdict(self._watch.rank, f"cannot go on: {message}", code=2)
            if not speaks_for_machine():
                message = None
        except Exception as error:  # whatever it is: no other rank may wait for this one
            verdict = self._reason(error)
            code, message = verdict.code, None if verdict.code == CLOSED_PIPE else verdict.text(self._describe)
        self._leave(code, message, verdict)

    def _meet(self) -> Group:
        """Find the other ranks."""
        environment, seconds = Environment.read(), self.args.meet_timeout_sec
        self._watch = Watch(environment.rank, self._judged)
        # Some ways not to find them, a foreign server at the port for one, never return.
        reason = f"rank {environment.rank} has not met the others after {seconds:g} s: did one end, or never start?"
        with self._limit(seconds + MEETING_SPARE, reason):
            return Group(environment, self._watch, timedelta(seconds=seconds))

    @contextmanager
    def _limit(self, seconds: float, reason: str) -> Iterator[None]:
        """End this process if what libraries do here takes longer: not all of them keep to a limit."""
        verdict = Verdict(self._watch.rank, f"cannot go on: {reason}", code=2)
        alarm = threading.Timer(seconds, self._leave, (2, reason, verdict))
        alarm.daemon = True
        alarm.start()
        try:
            yield
        finally:
            alarm.cancel()

    def _play(self, group: Group) -> int:
        """Agree, load, agree again, work."""
        args, rank = self.args, group.environment.rank
        loading = timedelta(seconds=args.load_timeout_sec)
        checked, facts = group.agree(lambda: self._check(group.environment), loading)
        self._describe = checked.layout.describe
        check_same(facts, self._describe)
        torch.set_num_threads(args.threads)
        if checked.emulation:
            exact_sleeps()
        if checked.device.type == "cuda":
            torch.cuda.set_device(checked.device)
        with self._limit(2 * args.meet_timeout_sec + MEETING_SPARE, f"rank {rank} could not connect to the others"):
            wires = group.wires(checked.layout, checked.device, checked.dtype, checked.backend)
        setup = Setup(
            layout=checked.layout,
            rank=rank,
            wires=wires,
            width=checked.width,
            anchors=checked.anchors,
            prefill_timeout=timedelta(seconds=args.prefill_timeout_sec),
            decode_timeout=timedelta(seconds=args.decode_timeout_sec),
            idle_timeout=USER_PATIENCE if self.script.interactive else loading,
            compiled=args.compile,
        )
        (target, head), memory = group.agree(lambda: self._load(setup, checked), loading)
        stage = self._stage(setup, target)
        if rank != DRAFT_RANK:
            return serve(StageServer(setup, target, stage))
        print(memory_table(setup.layout, memory), flush=True)
        warn_of_public(wires.connections.hosts)
        pipeline = Pipeline(setup, target, stage)
        code = self.script.run(Lead(args, checked, pipeline, head))
        pipeline.stop()
        return code

    def _stage(self, setup: Setup, target: Target) -> Stage | None:
        """The stage that this rank runs, if it runs one."""
        stage = setup.layout.stage_of(setup.rank)
        return None if stage is None else Stage(target, setup.layout.layers(stage), compiled=self.args.compile)

    def _check(self, environment: Environment) -> tuple[Checked, dict[str, str]]:
        checked = Checked(self.args, environment)
        if environment.rank == DRAFT_RANK:
            self.script.prepare(checked)
            self._claims.enter_context(self.script.claim())
        return checked, checked.facts(self.args)

    def _load(self, setup: Setup, checked: Checked) -> tuple[tuple[Target, SpeculationHead | None], dict[str, Any]]:
        """This rank's part of the target, and the first head where it drafts; and the memory that they take."""
        args, rank, layout = self.args, setup.rank, setup.layout
        part = layout.part(rank, checked.target_config.vocab_size)
        with no_loading_bar(hidden=rank != layout.rank_of(stage=0)):  # all ranks load at the same time: one bar will do
            target = Target.load(
                checked.base_model_path,
                dtype=setup.wires.dtype,
                device=setup.wires.device,
                attn_implementation=args.attn_implementation,
                trust_remote_code=args.trust_remote_code,
                part=part,
            )
        head = load_head(args.spec_head_ckpt[0], target) if rank == DRAFT_RANK else None
        return (target, head), memory_row(setup, target, head, part.layers)

    def _reason(self, error: Exception) -> Verdict:
        """Why this rank stops. With a lost rank the process usually ends in here, with what rank 0 decides."""
        if isinstance(error, LostRank):
            return self._watch.complain(error)
        rank = 0 if self._watch is None else self._watch.rank
        if isinstance(error, BrokenPipeError) and reader_is_gone():
            return Verdict(rank, "has nobody left who reads what it prints", code=CLOSED_PIPE)
        traceback.print_exception(error)
        return Verdict(rank, f"failed with {type(error).__name__}: {first_line(error)}")

    def _judged(self, verdict: Verdict) -> None:
        """The run is over. Called by the watch, in its thread."""
        text, own = verdict.text(self._describe), self._watch.rank
        if own != verdict.said_by:
            text = f"{self._describe(own)} stops: {text}"
        is_said = verdict.code != CLOSED_PIPE and (verdict.code != 2 or speaks_for_machine())
        self._leave(verdict.code, text if is_said else None)

    def _watch_signals(self) -> None:
        """Leave at once on SIGTERM and Ctrl-C, also when the main thread waits for a message outside Python."""
        wanted = {signal.SIGTERM, signal.SIGINT}
        signal.pthread_sigmask(signal.SIG_BLOCK, wanted)  # here, and in every thread that starts later

        def wait() -> None:
            number = signal.sigwait(wanted)
            while number == signal.SIGINT and self.script.interrupted():
                number = signal.sigwait(wanted)
            reason = f"stopped by {signal.Signals(number).name}"
            verdict = None if self._watch is None else Verdict(self._watch.rank, f"was {reason}")
            self._leave(
                128 + number, reason if speaks_for_machine() else None, verdict
            )  # all ranks are stopped at once

        threading.Thread(target=wait, daemon=True).start()

    def _leave(self, code: int, message: str | None = None, verdict: Verdict | None = None) -> NoReturn:
        """End this process, without waiting for receives that nothing will answer any more.

        verdict: why the others cannot go on either, where they do not know.
        """
        self._ending.acquire()  # for good: the first reason counts
        if self._watch is not None:
            if verdict is not None:
                self._watch.tell(verdict)
            else:
                self._watch.say_goodbye()
            if self._watch.rank == DRAFT_RANK and code not in (0, 2):
                within_seconds(self.script.last_words)
        if message is not None:
            text = f"{self.parser.prog}: {'' if code > 2 else 'error: '}{message}"
            within_seconds(lambda: print(text, file=sys.stderr))
        within_seconds(self._claims.close)
        within_seconds(sys.stdout.flush)
        within_seconds(sys.stderr.flush)
        os._exit(code)


def within_seconds(write: Callable[[], Any]) -> None:
    """Write something if anybody reads it: the pipe of an output may be closed, or full with nobody at its end."""

    def try_to() -> None:
        with suppress(OSError, ValueError):
            write()

    writer = threading.Thread(target=try_to, daemon=True)
    writer.start()
    writer.join(OUTPUT_SECONDS)


def serve(server: StageServer) -> int:
    """A stage's work. Returns the exit code."""
    try:
        server.serve()
    except NotCompiled:
        raise
    except ValueError as error:  # no other mistake of the user's, which are found before
        raise RuntimeError(f"ValueError: {error}") from error
    return 0


def warn_of_public(hosts: Sequence[str]) -> None:
    """Say so when ranks listen where the whole internet may reach them."""
    if addresses := public_addresses(hosts):
        print(
            f"warning: ranks listen at {', '.join(addresses)}, which is a public address: whoever reaches it can stop "
            "or change this run; name an inner network in GLOO_SOCKET_IFNAME (distributed_inference/README.md, Trust)",
            file=sys.stderr,
            flush=True,
        )


def memory_row(setup: Setup, target: Target, head: SpeculationHead | None, layers: range) -> dict[str, Any]:
    """What a rank holds, in bytes; the cache for 1,000 tokens."""
    weights = sum(weight.nbytes for weight in target.model.parameters())
    if head is not None:
        weights += sum(weight.nbytes for weight in head.parameters())
    nodes = setup.width * (setup.layout.num_stages + 2)
    plan = CachePlan(slots=1000, nodes=nodes, tree=setup.width > 1)
    cache = StageCache(target.config, layers, plan, target.dtype, torch.device("meta"))
    shown = f"{layers.start}-{layers.stop - 1}" if layers else "none"
    return {"device": str(setup.wires.device), "layers": shown, "weights": weights, "cache": cache.nbytes()}


def memory_table(layout: Layout, rows: Sequence[Mapping[str, Any]]) -> str:
    """What every rank holds, as it is printed at the start."""
    lines = [f"{'rank':<26}{'device':<8}{'layers':>8}{'weights':>12}{'cache of 1,000 tokens':>24}"]
    for rank, row in enumerate(rows):
        lines.append(
            f"{layout.describe(rank):<26}{row['device']:<8}{row['layers']:>8}{row['weights'] / 1e6:>9.1f} MB"
            f"{row['cache'] / 1e6:>21.2f} MB"
        )
    return "\n".join(lines)
