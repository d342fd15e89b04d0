"""Why an option of upstream's parser that is not honoured is refused, by family.

The families only word the message: an option that none of them covers, such as one of a later
upstream, is refused all the same.
"""

import re
from dataclasses import dataclass

__all__ = ["Family", "families", "family_of", "refusal"]


@dataclass(frozen=True, slots=True)
class Family:
    """Options that are refused for the same reason."""

    name: str
    why: str
    instead: str
    options: str = ""
    """Regular expression on the option without its dashes, matched from the start."""
    groups: tuple[str, ...] = ()
    """Titles of upstream's argument groups."""

    def covers(self, option: str, group: str) -> bool:
        """Whether the option, or the group it stands in, belongs to this family."""
        by_name = self.options and re.match(self.options, option.removeprefix("--"))
        return bool(by_name) or group in self.groups


_REMOVE = "remove it"
_DENSE_ONLY = "the model here is a dense decoder of attention and MLP layers"

# The first family that covers an option words its refusal: narrow ones stand before wide ones.
_FAMILIES = (
    Family(
        "checks for NaN",
        "an update that is not finite is always left out, so that the run could only go on without "
        "it, which is what --skip-nan-iterations does",
        "use --skip-nan-iterations, or remove it to stop at such an update",
        r"no-check-for-nan-in-loss-and-grad$",
    ),
    Family(
        "micro-batches",
        "packing decides how sequences share micro-batches, anew in every iteration",
        "set their size by --max-tokens-per-micro-batch",
        r"(eval-)?micro-batch-size$|batch-size$",
    ),
    Family(
        "changing batch size",
        "the global batch has one size for the whole run",
        "set it by --global-batch-size or --global-batch-tokens",
        r"rampup-batch-size|step-batch-size|decrease-batch-size|phase-transition|eval-global-batch",
    ),
    Family(
        "training by samples",
        "a run is measured in iterations, whose number of samples may vary",
        "use --train-iters, --lr-decay-iters, --lr-warmup-iters, --lr-wsd-decay-iters",
        r"(train|lr-\w[\w-]*)-samples$|iterations-to-skip|sample-rate",
    ),
    Family(
        "RL",
        "reinforcement learning is not part of this program",
        "remove it, or train with upstream's own entry point",
        r"rl-|grpo-|langrl-|perform-rl",
        ("rl",),
    ),
    Family(
        "inference",
        "this program trains",
        _REMOVE,
        r"inference-|flash-decode|symmetric-ar|nccl-all-reduce-for-prefill|mlp-chunks-for-prefill|"
        r"batch-invariant",
        ("inference",),
    ),
    Family(
        "recompute",
        "it is an older name of a form of activation recompute, or one that needs the tensor "
        "parallelism of a single strategy",
        "use --recompute-granularity selective or full",
        r"moe-layer-recompute|checkpoint-activations|distribute-saved-activations",
    ),
    Family(
        "offloading",
        "moving activations or optimizer state to the host is not part of this program",
        "remove it; use a scheme of more tp or pp ranks if memory is short",
        r".*offload|optimizer-cpu|no-pin-cpu|use-torch-optimizer-for-cpu|overlap-cpu-optimizer|"
        r"moe-paged-stash",
    ),
    Family(
        "CUDA graphs",
        "shapes differ between micro-batches and iterations, which a graph cannot replay",
        _REMOVE,
        r".*cuda-graph",
    ),
    Family(
        "8- and 4-bit arithmetic",
        "fp8 and fp4 are not part of this program",
        "use --bf16",
        r".*(fp8|fp4)|first-last-layers-bf16|num-layers-at-\w+-in-bf16|.*kitchen|te-precision",
        ("Transformer-Engine",),
    ),
    Family(
        "experts",
        f"{_DENSE_ONLY}, without experts",
        _REMOVE,
        r"num-experts|moe-|expert-|overlap-moe|ep-overlap|overlap-dispatch|.*shared-expert|"
        r"high-priority-a2a|delay-wgrad|save-tokens-per-expert",
        ("moe",),
    ),
    Family(
        "multi-latent attention",
        f"{_DENSE_ONLY}, without latent projections",
        _REMOVE,
        r"multi-latent|mla-",
        ("mla",),
    ),
    Family(
        "other attention",
        "attention here is causal softmax over packed sequences, by the backend of the device",
        _REMOVE,
        r"experimental-attention|dsa-|linear-|window-|softmax-type|attention-|use-flash-attn|"
        r"flash-attention|qk-|no-rope-freq|apply-query-key|relative-attention",
        ("experimental_attention_variant",),
    ),
    Family(
        "state-space and hybrid models",
        f"{_DENSE_ONLY}, one kind of layer throughout",
        _REMOVE,
        r".*mamba|.*hybrid-(layer|override)-pattern|is-hybrid|spec-hybrid",
        ("heterogeneous architecture",),
    ),
    Family(
        "older names",
        "it is an older name of another option",
        "use --position-embedding-type",
        r"use-rotary-position|no-position-embedding|rope-type",
    ),
    Family(
        "multi-token prediction",
        f"{_DENSE_ONLY} that predicts one token",
        _REMOVE,
        r"mtp-",
    ),
    Family(
        "encoders",
        "the model here is a decoder of text",
        "describe it by --num-layers and --seq-length",
        r"(encoder|decoder)-(num-layers|seq-length)|bert-|mask-prob|short-seq-prob",
        ("biencoder",),
    ),
    Family(
        "vision",
        "the model here is a decoder of text",
        _REMOVE,
        r"mrope-",
        ("vision",),
    ),
    Family(
        "virtual pipeline",
        "a rank holds one stage, consecutive layers, of a pipeline",
        "give the layers of each stage in --strategy, for example 'pp2:5,3'",
        r".*virtual|microbatch-group-size|.*overlap-p2p|defer-embedding|wgrad-deferral",
    ),
    Family(
        "pipeline layout",
        "the strategy says which layers a stage holds",
        "give the layers of each stage in --strategy, for example 'pp2:5,3'",
        r"decoder-(first|last)-pipeline|pipeline-model-parallel-(layout|comm)|account-for-",
    ),
    Family(
        "context parallelism",
        "how many ranks share a sequence belongs to a replica, not to the job, and may differ from "
        "one micro-batch to the next",
        "remove it; name cp in --strategy or --strategy-pool, for example cp2, or cp8~ where "
        "micro-batches may split it",
        r".*context-parallel|max-seqlen-per-dp-cp",
    ),
    Family(
        "checkpoints",
        "checkpoints have one format, are always read and written by all ranks, and hold whatever "
        "a run needs to go on",
        "use --save, --save-interval, --load, --async-save and --keep-last",
        r"override-ckpt|(override|use-checkpoint)-opt_?-?param|exit-on-missing|.*-ckpt-",
        ("checkpointing",),
    ),
    Family(
        "half precision with loss scaling",
        "parameters are fp32 or bf16, which need no loss scaling",
        "use --bf16",
        r"fp16|.*loss-scale|hysteresis|fp32-residual|grad-reduce-in-bf16",
        ("mixed precision",),
    ),
    Family(
        "other optimizers",
        "canonical shards are updated by AdamW with fp32 state",
        "use --optimizer adam and its flags",
        r"muon-|sgd-|lion-|use-precision-aware|main-(grads|params)-dtype|exp-avg|optimizer-|"
        r"decoupled-|freeze-all|apply-wd|no-weight-decay-cond|warmup$|dump-param",
    ),
    Family(
        "data-parallel wrappers",
        "gradients and parameters move between canonical shards and replicas, not through "
        "upstream's data-parallel wrappers",
        _REMOVE,
        r"ddp-|.*fsdp|overlap-(grad|param)|.*align-(grad|param)|.*gradient-reduce|.*sharding|"
        r"no-use-layer-wise|use-nccl-ub|disable-symmetric|create-all-gather|suggested-comm|"
        r"num-distributed-optimizer|keep-fp8|enable-full-sharding",
    ),
    Family(
        "tensor-parallel overlap",
        "replicas run upstream's tensor-parallel layers without communication overlap",
        _REMOVE,
        r".*tp-comm|tensor-parallel-num-weight|model-parallel-size|use-ring-exchange",
    ),
    Family(
        "process groups",
        "process groups follow from the strategy",
        "describe the layout by --strategy and --ranks-per-node",
        groups=("distributed init",),
    ),
    Family(
        "initialisation",
        "initial weights depend on --seed and --init-method-std alone, never on the strategy",
        _REMOVE,
        r".*init-method|init-model|use-cpu-init|no-initialization|(use-)?mup|embedding-init",
        ("RNG and initialization",),
    ),
    Family(
        "upstream's data sets",
        "a sequence is a whole document of the corpus, read without an index cache",
        "describe the corpus by --data-path or --train-data-path and the --*-data-path flags",
        groups=("data and dataloader",),
        options=r"dataloader-",
    ),
    Family(
        "tokenizer",
        "this setting of the tokenizer has no effect on training from prepared data",
        _REMOVE,
        groups=("tokenizer",),
    ),
    Family(
        "fine-tuning",
        "supervised fine-tuning and distillation are not part of this program",
        _REMOVE,
        groups=("sft", "Logits Distillation"),
    ),
    Family(
        "evaluation",
        "evaluation runs --eval-iters global batches of the validation part",
        "use --eval-interval and --eval-iters",
        groups=("validation",),
    ),
    Family(
        "fault tolerance",
        "upstream's restart, straggler and fault machinery is not wired to this program's step",
        _REMOVE,
        groups=(
            "autoresume",
            "straggler",
            "workload inspector",
            "In-process restart",
            "ft_package",
            "rerun engine",
            "fault injector",
            "one logger",
            "msc",
        ),
    ),
    Family(
        "profiling",
        "upstream's profiler switches are not wired to this program's step",
        "remove it, and run an outside profiler around the job",
        groups=("profiling",),
    ),
    Family(
        "logging",
        "the quantity it reports is not computed by this program's step",
        "remove it; metrics.jsonl and TensorBoard hold what is computed",
        r"log-|no-barrier|check-",
        ("logging",),
    ),
    Family(
        "model variants",
        "this variant of the model was not shown to be equal under every strategy",
        _REMOVE,
        groups=("transformer configuration", "network size"),
    ),
)
_UNKNOWN_TO_FAMILIES = Family(
    "others", "this program does not act on it and will not pretend to", _REMOVE
)


def families() -> tuple[Family, ...]:
    """All of them, as docs/configuration-errors.md lists them."""
    return (*_FAMILIES, _UNKNOWN_TO_FAMILIES)


def family_of(option: str, group: str) -> Family:
    """The family of an option that stands in the argument group of that title."""
    for family in _FAMILIES:
        if family.covers(option, group):
            return family
    return _UNKNOWN_TO_FAMILIES


def refusal(option: str, group: str) -> str:
    """One line: the option by name, why it is refused, and what to do instead."""
    family = family_of(option, group)
    return f"{option} is not honoured: {family.why}; {family.instead}"
