"""What this program does with each option of upstream's parser that is about experts."""

from megatron.hydraulis.flags.rows import Honoured, Need, Refused

TOPIC = """
    --num-experts --moe-layer-freq --moe-ffn-hidden-size --moe-router-topk
    --moe-router-score-function --moe-router-pre-softmax --moe-router-num-groups
    --moe-router-group-topk --moe-router-topk-scaling-factor --moe-router-dtype
    --moe-router-load-balancing-type --moe-aux-loss-coeff --moe-z-loss-coeff
    --moe-router-enable-expert-bias --moe-router-bias-update-rate
    --moe-shared-expert-intermediate-size
    --moe-shared-expert-gate --moe-token-dispatcher-type --moe-grouped-gemm --moe-permute-fusion
    --expert-model-parallel-size --expert-tensor-parallel-size"""

RESTRICTED = {
    "--moe-router-enable-expert-bias": Honoured(
        "biases of routers follow the load of experts in all tokens of an update"
    ),
    "--moe-router-score-function": Honoured(
        "scores of a router",
        only=("softmax", "sigmoid"),
        otherwise="these scores were not shown to be equal under every strategy; "
        "use softmax or sigmoid",
    ),
    "--moe-router-load-balancing-type": Honoured(
        "aux_loss and seq_aux_loss add the loss of each sequence, weighted by its tokens",
        only=("aux_loss", "seq_aux_loss", "none"),
        otherwise="this way of balancing depends on packing, so the plan would change the update; "
        "use seq_aux_loss, which balances each sequence and is the nearest",
    ),
    "--moe-grouped-gemm": Honoured(
        "a call for the products of all experts, in layers of Transformer Engine; elsewhere one "
        "by one, with the same result"
    ),
    "--moe-permute-fusion": Honoured(
        "kernels of Transformer Engine, in its layers, sort tokens by expert; elsewhere torch's, "
        "with the same result"
    ),
    "--moe-token-dispatcher-type": Honoured(
        "how tokens reach their experts; flex, and allgather in waves (cp4~ep4), run as alltoall",
        only=("allgather", "alltoall", "flex"),
        otherwise="this dispatcher is not built; use allgather or alltoall",
    ),
}

_EXPERTS = Need("num_experts", "--num-experts")
_OF_OTHERS = {
    Need(
        "moe_shared_expert_intermediate_size", "--moe-shared-expert-intermediate-size"
    ): "--moe-shared-expert-gate",
    Need(
        "moe_router_enable_expert_bias", "--moe-router-enable-expert-bias"
    ): "--moe-router-bias-update-rate",
}
_NEED_EXPERTS = [
    option
    for option in TOPIC.split()
    if option != "--num-experts" and option not in _OF_OTHERS.values()
]
NEEDS = {_EXPERTS: " ".join(_NEED_EXPERTS), **_OF_OTHERS}

TAKEN_FOR = {
    "separate kernels, with the same result": """
        --moe-router-fusion --moe-single-grouped-weight --moe-single-grouped-bias
        --use-grouped-gemm-for-shared-expert --moe-shared-expert-overlap""",
    "plain collectives exchange tokens, with the same result": """
        --overlap-moe-expert-parallel-comm --delay-wgrad-compute
        --overlap-dispatch-backward-with-experts-wgrad --ep-overlap-early-attn-memory-release
        --high-priority-a2a-comm-stream
        --moe-enable-deepep --moe-flex-dispatcher-backend --moe-permute-fusion-into-hybridep
        --moe-hybridep-pad-uneven-dispatch-inputs --moe-flex-dispatcher-num-sms
        --moe-deepep-num-sms --moe-hybridep-num-sms --moe-hybridep-num-blocks-permute
        --moe-hybridep-num-blocks-unpermute --moe-hybridep-num-sms-preprocessing
        --moe-ncclep-static-shape --moe-ncclep-zero-copy""",
    "no token is dropped": "--moe-pad-expert-input-to-capacity --moe-token-drop-policy",
    "it has an effect only with an option of experts that is refused": """
        --moe-upcycling-granularity --moe-router-quantile-balancing-ema
        --moe-router-padding-for-quantization --moe-router-padding-for-fp8
        --moe-pad-experts-for-cuda-graph-inference --moe-enable-routing-replay""",
    "the activations of experts are kept, which takes more memory": """
        --moe-layer-recompute --moe-paged-stash --moe-paged-stash-page-size
        --moe-paged-stash-buffer-size-factor-cuda --moe-paged-stash-buffer-size-factor-cpu""",
    "the log and metrics.jsonl have the load of the busiest expert": """
        --moe-per-layer-logging --save-tokens-per-expert-interval --moe-routing-trace-path
        --moe-routing-trace-max-training-iters --moe-routing-trace-capture-logits
        --moe-routing-trace-capture-hidden-states --moe-routing-trace-dump-weights""",
}
"""As `_TAKEN_FOR` of `flags.options`, whether the model has experts or not."""

_LAW = "the plan would change the update"
REFUSED = (
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
)
