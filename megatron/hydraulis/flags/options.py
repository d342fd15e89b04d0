"""Treatment of each option of upstream's parser: one row says it, `row_of` finds it.

An option is *honoured*, *taken* (accepted without acting on it, because the update is the same) or
*refused* (it would change the model, the data or the update in a way that is not built). An option
in no row, such as one of a later upstream, is refused. Everything that users read about options is
made from these rows: --help, the log, docs/flags.md, docs/coming-from-megatron.md.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron.hydraulis.flags.honoured import HONOURED, Honoured, Need


@dataclass(frozen=True, slots=True)
class Taken:
    """An option that is accepted and ignored: the update is the same."""

    instead: str
    """Phrase that says what happens instead."""
    only: tuple[object, ...] | None = None
    """The values that are accepted; None accepts all that the parser does."""
    otherwise: str = ""
    """Reason why another value is refused and what to do instead: ``why; fix``."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Options that are refused for the same reason: they would change model, data or update."""

    name: str
    why: str
    fix: str
    options: str = ""
    """Regular expression on the whole option without its dashes."""
    groups: tuple[str, ...] = ()
    """Titles of upstream's argument groups."""
    need: Need | None = None
    """A setting without which the options have no effect; they are then taken."""
    changes_costs: bool = True
    """Whether time or memory may depend on the options: planning commands refuse them, too."""

    def covers(self, option: str, group: str) -> bool:
        """True if the option, or the group it stands in, belongs here."""
        by_name = self.options and re.fullmatch(self.options, option.removeprefix("--"))
        return bool(by_name) or group in self.groups


Row = Honoured | Taken | Refused


_STAGES = "--strategy gives the layers of stages, as in 'pp2:5,3'; otherwise the split is even"

_TAKEN_FOR = {
    "packing decides how sequences share a micro-batch; --max-tokens-per-micro-batch limits it": (
        r"(eval-)?micro-batch-size"
    ),
    "gradients and parameters move between shards and replicas during compute, without Megatron's "
    "data-parallel wrapper": r"overlap-(grad-reduce|param-gather.*)|no-align-(grad-reduce|"
    r"param-gather)|ddp-.*|no-use-layer-wise-param-layout|use-nccl-ub|create-all-gather-group|"
    r"disable-symmetric-registration|no-gradient-reduce-div-fusion|"
    r"suggested-communication-unit-size|num-distributed-optimizer-instances",
    "optimizer state and gradients stay fp32, which is more precise": (
        r"use-precision-aware-optimizer|(main-(grads|params)|exp-avg|exp-avg-sq)-dtype"
    ),
    "tensor-parallel layers run without this overlap of communication": (
        r"(no-)?tp-comm-.*|use-ring-exchange-p2p"
    ),
    "pipelines run without interleaving": r"num-layers-per-virtual-pipeline-stage|"
    r"num-virtual-stages-per-pipeline-rank|microbatch-group-size-per-virtual-pipeline-stage|"
    r"(no-)?overlap-p2p-communication.*|defer-embedding-wgrad-compute|wgrad-deferral-limit",
    _STAGES: r"decoder-(first|last)-pipeline-num-layers|pipeline-model-parallel-layout|"
    r"mtp-standalone|account-for-(embedding|loss)-in-pipeline-split",
    "process groups follow from the strategy": r"use-tp-pp-dp-mapping|lazy-mpu-init|use-sharp|"
    r"sharp-enabled-group|disable-gloo-process-groups|high-priority-stream-groups|"
    r"nccl-communicator-config-path|pipeline-model-parallel-comm-backend|"
    r"hierarchical-context-parallel-sizes",
    "--distributed-timeout-minutes holds for the whole run": (
        r"distributed-timeout-seconds-after-init"
    ),
    "torch's own variables configure its flight recorder": r"(no-)?flight-recorder-.*",
    "--core-attention chooses the kernel; each of them keeps sequences apart": (
        r"use-flash-attn|flash-attention-version"
    ),
    "every kernel computes the softmax in fp32": (
        r"attention-softmax-in-fp32|apply-query-key-layer-scaling"
    ),
    "the loss is always computed in chunks of tokens (--loss-chunk-tokens), the same value": (
        r"cross-entropy-(loss-fusion|fusion-impl)"
    ),
    "an unfused kernel computes the same": r"fused-residual-rmsnorm|use-te-activation-func|"
    r"use-transformer-engine-op-fuser|use-fused-weighted-squared-relu|mlp-chunks-for-training|"
    r"no-clone-scatter-output-in-embedding|use-grouped-gemm-for-dense-mlp",
    "each rank reads its sequences from memory-mapped files, without index caches or loader "
    "processes": r"num-workers|data-cache-path|no-mmap-bin-files|num-dataset-builder-threads|"
    r"no-data-sharding|mid-level-dataset-surplus|dataloader-(fast-cache-load|defer-npy-index-mmap)",
    "attention stays inside a sequence: always so": (
        r"no-create-attention-mask-in-dataloader|dataloader-inter-document-masking"
    ),
    "the end of a document predicts nothing; what follows an end inside a document is predicted": (
        r"eod-mask-loss"
    ),
    "losses are not scaled, which neither fp32 nor bf16 needs": r"loss-scale",
    "initial weights depend on --seed and --init-method-std alone": (
        r"use-cpu-initialization|init-model-with-meta-device|(te|inference)-rng-tracker"
    ),
    "checkpoints have the format torch_dist, which all ranks write and read in parallel": (
        r"(auto-detect-)?ckpt-format|(no-)?ckpt-fully-parallel-.*|ckpt-assume-constant-structure|"
        r"no-ckpt-load-validate-sharding-integrity|use-dist-ckpt|dist-ckpt-(format|strictness|"
        r"save-pre-mcore-014|workers)|distrib-optim-fully-reshardable-mem-efficient|"
        r"no-strict-fsdp-dtensor-load|async-(strategy|ckpt-.*)|use-persistent-ckpt-worker|"
        r"verify-integrity|no-stream-ckpt-dequant"
    ),
    "a checkpoint holds the whole training state, more than asked": r"no-save-(optim|rng)",
    "training draws no random numbers, and data continue where the checkpoint was made": (
        r"no-load-rng"
    ),
    "--keep-last says which checkpoints are kept; by default all": r"save-retain-interval",
    "only --save-interval writes checkpoints": r"non-persistent-.*|replication(-jump|-factor)?",
    "nothing is moved to host memory; limits on micro-batches keep the job in device memory": (
        r"cpu-offloading-.*|fine-grained-(activation-offloading|offloading-.*)|offload-modules|"
        r"min-offloaded-tensor-size|delay-offload-until-cuda-graph|activation-offload-fraction|"
        r"delta-offload-bytes-across-pp-ranks|optimizer-(cpu-offload|offload-fraction)|"
        r"use-torch-optimizer-for-cpu-offload|overlap-cpu-optimizer-d2h-h2d|no-pin-cpu-.*"
    ),
    "every rank keeps what its layers save": r"distribute-saved-activations",
    "kernels are launched one by one, as shapes differ between micro-batches": (
        r"(enable-|external-|optimizer-)?cuda-graph|"
        r"cuda-graph-(impl|warmup-steps|scope|modules)"
    ),
    "a non-finite update stops the run; --skip-nan-iterations skips it": (
        r"no-check-for-nan-in-loss-and-grad|check-for-(spiky-loss|large-grads)|rerun-mode|"
        r"result-rejected-tracker-filename"
    ),
    "the quantity is not computed; metrics.jsonl and TensorBoard hold what is": (
        r"log-(params-norm|progress|memory-to-tensorboard|memory-interval|device-memory-used|"
        r"num-zeros-in-grad|max-attention-logit|energy)|no-barrier-with-level-1-timing|"
        r"check-weight-hash-across-dp-replicas-interval|config-logger-dir"
    ),
    "Megatron's profiler does not run; --trace DIR records iterations": (
        r"profile(-step-start|-step-end|-ranks)?|(use-)?pytorch-profiler.*|record-memory-history|"
        r"memory-snapshot-path|record-shapes|nvtx-ranges"
    ),
    "--report-drift names slow ranks": r"log-straggler|straggler-.*|disable-straggler-on-startup|"
    r"gpu-sniff-test-interval|run-workload-inspector-server",
    "no metrics go to One Logger": r"one-logger-.*|app-tag-run-(name|version)",
    "torchrun or Slurm restarts ranks": r"adlr-autoresume(-interval)?|inprocess-.*",
    "the run detects ranks that hang by itself": (
        r"enable-ft-package|calc-ft-timeouts|ft-num-warmup-iters"
    ),
    "paths are those of mounted file systems": r"disable-msc",
    "any number of ranks trains a global batch of any size": r"decrease-batch-size-if-needed",
    "memory is released when a micro-batch needs it": r"empty-unused-memory-level",
    "the host waits for the device once an iteration": r"train-sync-interval",
    "signals end the run; --exit-signal-handler saves first": (
        r"exit-signal-handler-for-(dataloader|training)"
    ),
    "it enables nothing by itself": r"enable-experimental",
    "a matrix for each latent, with the same result": r"mla-down-proj-fusion",
    "data are prepared with their tokens": r"chat-template",
    "separate kernels, with the same result": r"moe-router-fusion|moe-single-grouped-(weight|bias)|"
    r"use-grouped-gemm-for-shared-expert|moe-shared-expert-overlap",
    "plain collectives exchange tokens, with the same result": (
        r"overlap-moe-expert-parallel-comm|delay-wgrad-compute|high-priority-a2a-comm-stream|"
        r"overlap-dispatch-backward-with-experts-wgrad|ep-overlap-early-attn-memory-release|"
        r"moe-(enable-deepep|flex-dispatcher-.*|permute-fusion-into-hybridep|deepep-.*|"
        r"hybridep-.*|ncclep-.*)"
    ),
    "no token is dropped": r"moe-(pad-expert-input-to-capacity|token-drop-policy)",
    "it has an effect only with an option of experts that is refused": (
        r"moe-upcycling-granularity|moe-router-(quantile-balancing-ema|padding-for-.*)|"
        r"moe-pad-experts-for-cuda-graph-inference|moe-enable-routing-replay"
    ),
    "the activations of experts are kept, which takes more memory": (
        r"moe-layer-recompute|moe-paged-stash.*"
    ),
    "the log and metrics.jsonl have the load of the busiest expert": (
        r"moe-per-layer-logging|save-tokens-per-expert-interval|moe-routing-trace-.*"
    ),
}
"""Phrase that says what happens instead -> regular expression on options, without their dashes,
that are taken whether what they configure is there or not."""

_TAKEN_BY_VALUE = {
    "--dataloader-type": Taken(
        "the order of sequences comes from --seed, a new one in every epoch",
        only=("single", "cyclic"),
        otherwise="sequences come from --data-path; use single or cyclic",
    ),
    "--vocab-extra-ids": Taken(
        "no entries are added", only=(0,), otherwise="the vocabulary is the tokenizer's; use 0"
    ),
}

_ONLY_WITH = {
    "--fp8-format or --fp4-format": r"no-fp8-wgrad|(fp8|fp4)-(recipe|quantizer-factory|margin|"
    r"interval|amax-.*|output-proj|param-gather)|first-last-layers-bf16|"
    r"num-layers-at-(start|end)-in-bf16|reuse-grad-buf-for-mxfp8-param-ag|"
    r"keep-fp8-transpose-cache",
    "--fp16": r"(initial|min)-loss-scale|loss-scale-window|hysteresis|fp16-lm-cross-entropy",
    "--optimizer muon, lion or sgd": r"(muon|lion|sgd)-.*",
    "M in --hybrid-layer-pattern": r"mamba-(?!inference).*|disable-mamba-mem-eff-path",
    "--experimental-attention-variant": r"(no-)?dsa-.*",
    "--use-megatron-fsdp or --use-torch-fsdp2": r"(megatron-)?fsdp-.*|torch-fsdp2-.*|"
    r"no-torch-fsdp2-.*|(data-parallel|outer-dp)-sharding-strategy|enable-full-sharding-in-hsdp",
    "--position-embedding-type relative": r"relative-attention-.*",
    "--qk-clip": r"qk-clip-.*",
    "--use-kitchen-attention": r"kitchen-attention-backend",
    "--use-mup": r"mup-.*",
    "--fim-data": r"fim-(?!data).*",
    "--perform-rl-step": r"rl-.*|grpo-.*|langrl-.*|refit-method",
    "--use-checkpoint-args": r"use-mp-args-from-checkpoint-args|"
    r"no-use-tokenizer-model-from-checkpoint-args",
    "programs for inference": r"inference-.*|flash-decode|decode-only-cuda-graphs|.*-prefills?|"
    r"cache-mla-latents|max-tokens-to-oom|use-legacy-static-engine|num-speculative-tokens|"
    r"use-same-sampling-seed-across-dp-ranks|symmetric-ar-type|mamba-inference-.*",
    "programs for vision": r"img-.*|num-(classes|channels)|patch-dim|classes-fraction|"
    r"data-per-class-fraction|head-lr-mult|vision-(?!pretraining$).*|"
    r"swin-.*|mask-(type|factor)|iter-per-epoch|dino-.*",
    "programs for encoders": r"bert-.*|output-bert-embeddings|mask-prob|short-seq-prob|ict-.*|"
    r"biencoder-.*|titles-data-path|query-in-block-prob|use-one-sent-docs|evidence-data-path|"
    r"retriever-.*|block-data-path|embedding-path|indexer-.*",
}
"""Option or program without which others have no effect, and which is refused or is not this one
-> regular expression on these others, which are taken."""

_REMOVE = "remove it"
_LAW = "the plan would change the update"
_EXPERTS = Need("num_experts", "--num-experts")
_DECODER_ONLY = "the model here is a decoder"

EQUIVALENTS: Mapping[str, str] = MappingProxyType(
    {
        "--sliding-window": "--window-size",
        "--qk-nope-head-dim": "--qk-head-dim",
        "--qk-rope-head-dim": "--qk-pos-emb-head-dim",
        "--wandb-name": "--wandb-exp-name",
    }
)
"""Options of forks that upstream does not know -> those of upstream with the same meaning."""

FORMER_OPTIONS = (
    "--emulate-device",
    "--emulate-scale",
    "--long-sequence-window",
    "--refit-cost-profile",
    "--refit-drift",
)
"""Options of our own that earlier versions had."""

# The first row that covers an option words its refusal, so narrow ones stand before wide ones.
_REFUSED = (
    Refused(
        "emulation",
        "emulated devices are part of the benchmarks",
        "in a checkout of the repository give the same flags to torchrun -m "
        "benchmarks.emulated_training",
        r"emulate-.*",
    ),
    Refused(
        "long sequences that wait",
        "no sequence waits for another: the pool of the examples trained 0.93 × the tokens/s so",
        "remove it; a checkpoint written with it loads, and trains first what it held",
        r"long-sequence-window",
    ),
    Refused(
        "refitted cost profiles",
        "plans keep the cost profile during a run",
        "use --report-drift 0.1, which names drift and slow ranks, and measure again by "
        "hydraulis profile",
        r"refit-(cost-profile|drift)",
    ),
    Refused(
        "former names",
        "Megatron removed it",
        "use --global-batch-size, --lr-warmup-fraction, --tensor-model-parallel-size, "
        "--recompute-granularity, --num-layers or --seq-length, which replaced it",
        r"batch-size|warmup|model-parallel-size|checkpoint-activations|(encoder|decoder)-num-layers|"
        r"(encoder|decoder)-seq-length|onnx-safe",
    ),
    Refused(
        "skipped data",
        "every iteration trains on the sequences that follow, in one order for the whole run",
        _REMOVE,
        r"phase-transition-iterations|iterations-to-skip|sample-rate",
        changes_costs=False,
    ),
    Refused(
        "RL",
        "reinforcement learning is not part of this program",
        "remove it, or train with upstream's own entry point",
        r"perform-rl-step",
    ),
    Refused(
        "8- and 4-bit arithmetic",
        "fp8 and fp4 are not part of this program",
        "use --bf16",
        r".*(fp8|fp4).*|te-precision-config-file",
    ),
    Refused(
        "attention of Kitchen",
        "--core-attention chooses among kernels that keep sequences apart, without Kitchen's",
        _REMOVE,
        r"use-kitchen-attention",
    ),
    Refused(
        "capacity of experts",
        f"which tokens an expert drops depends on packing, so {_LAW}",
        "remove it",
        r"moe-expert-(rank-)?capacity-factor",
        need=_EXPERTS,
    ),
    Refused(
        "shards of experts' weights",
        "a rank holds a whole expert, or tp cuts it",
        "remove it",
        r"expert-tensor-parallel-num-weight-shards",
        need=_EXPERTS,
    ),
    Refused(
        "random routing",
        f"each rank would draw different random numbers, so {_LAW}",
        "remove it",
        r"moe-input-jitter-eps|moe-router-force-.*",
        need=_EXPERTS,
    ),
    Refused(
        "variants of experts",
        "this variant of experts was not shown to be equal under every strategy",
        "remove it",
        r"moe-.*",
        need=_EXPERTS,
    ),
    Refused(
        "other attention",
        "attention here is causal softmax over packed sequences",
        _REMOVE,
        r"experimental-attention-variant|linear-attention-freq|qk-(l2-norm|clip)",
    ),
    Refused(
        "other hybrid models",
        "--hybrid-layer-pattern alone says which kinds of layers a model has",
        "use it, with *, +, -, E and G",
        r".*mamba.*|.*hybrid-override-pattern|is-hybrid-model|heterogeneous-layers-.*",
    ),
    Refused(
        "variants of multi-token prediction",
        "every layer that predicts has its own weights and trains all of the model",
        _REMOVE,
        r"mtp-.*",
        need=Need("mtp_num_layers", "--mtp-num-layers"),
    ),
    Refused("vision", "the model here is a decoder of text", _REMOVE, groups=("vision",)),
    Refused("vision positions", "the model here is a decoder of text", _REMOVE, r"mrope-.*"),
    Refused(
        "layout of the job",
        "how many ranks share a sequence or a weight belongs to a replica",
        "remove it; --strategy or --strategy-pool gives tp and cp, as in tp2cp4 or cp8~",
        r".*context-parallel.*|max-seqlen-per-dp-cp-rank|tensor-parallel-num-weight-shards",
    ),
    Refused(
        "checkpoints",
        "which weights and settings a run starts with, or what it dumps, is not chosen in this way",
        "use --load, with --finetune for weights alone, and give the options of the model",
        groups=("checkpointing",),
        changes_costs=False,
    ),
    Refused(
        "half precision with loss scaling",
        "parameters are fp32 or bf16, which need no loss scaling",
        "use --bf16",
        r"fp16|fp32-residual-connection",
    ),
    Refused(
        "other optimizers",
        "all parameters are updated by AdamW, and all but biases and norms decay",
        _REMOVE,
        r"freeze-all-layers|"
        r"dump-param-to-param-group-map",
    ),
    Refused(
        "fully sharded data parallelism",
        "all ranks share parameters between iterations; between layers cp ranks do, as in cp8fs",
        "remove it; if memory is short, name such replicas by --strategy, or more tp or pp",
        r"use-(megatron-fsdp|torch-fsdp2)",
    ),
    Refused(
        "process groups",
        "ranks come from the launcher",
        _REMOVE,
        groups=("distributed init",),
        changes_costs=False,
    ),
    Refused(
        "initialisation",
        "initial weights depend on --seed and --init-method-std alone, never on the strategy",
        _REMOVE,
        r"no-initialization|embedding-init-method-std|use-mup|init-method-xavier-uniform|"
        r"data-parallel-random-init",
        changes_costs=False,
    ),
    Refused(
        "other data",
        "a sequence is a whole document of a corpus",
        "name the corpus by --data-path, or --train-data-path with its companions",
        groups=("data and dataloader",),
        changes_costs=False,
    ),
    Refused(
        "tokenizer",
        "the vocabulary is padded so that every strategy can divide it",
        "use --make-vocab-size-divisible-by or --padded-vocab-size",
        groups=("tokenizer",),
    ),
    Refused(
        "distillation",
        "distillation is not part of this program",
        _REMOVE,
        groups=("Logits Distillation",),
    ),
    Refused(
        "evaluation",
        "evaluation runs --eval-iters global batches of the validation part",
        "use --eval-interval and --eval-iters; to evaluate a checkpoint without training, --load "
        "it with --no-load-optim, --eval-iters and --train-iters equal to its iteration",
        r"skip-train|test-mode",
        ("validation",),
        changes_costs=False,
    ),
    Refused(
        "injected faults",
        "it makes a healthy job fail",
        _REMOVE,
        r"error-injection-.*|fault-injector-.*",
        changes_costs=False,
    ),
    Refused(
        "determinism",
        "packed rows differ from batch to batch, and kernels are chosen for speed",
        "remove it; --deterministic-mode repeats a run",
        r"batch-invariant-mode",
    ),
    Refused(
        "model variants",
        "this variant of the model was not shown to be equal under every strategy",
        _REMOVE,
        groups=("transformer configuration", "network size"),
    ),
)
_IN_NO_ROW = Refused("others", "this program does not act on it", _REMOVE)


def refusals() -> tuple[Refused, ...]:
    """All rows of options that training refuses."""
    return (*_REFUSED, _IN_NO_ROW)


def row_of(option: str, group: str) -> Row:
    """The row of a primary option string that stands in the argument group of that title.

    An option that no row covers, such as one of a later upstream, is refused.
    """
    if option in HONOURED:
        return HONOURED[option]
    if option in _TAKEN_BY_VALUE:
        return _TAKEN_BY_VALUE[option]
    name = option.removeprefix("--")
    for instead, pattern in _TAKEN_FOR.items():
        if re.fullmatch(pattern, name):
            return Taken(instead)
    for what, pattern in _ONLY_WITH.items():
        if re.fullmatch(pattern, name):
            return Taken(f"it has an effect only with {what}")
    return next((row for row in _REFUSED if row.covers(option, group)), _IN_NO_ROW)


def refusal(option: str, row: Refused) -> str:
    """One line: the option by name, why it is refused, and what to do instead."""
    return f"{option} is not honoured: {row.why}; {row.fix}"
