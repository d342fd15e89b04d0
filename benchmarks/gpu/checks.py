"""The steps, their figures and bounds: what is expected is stated here, before anything runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.gpu import programs
from benchmarks.gpu.runner import Figure, Run, Step
from benchmarks.gpu.sizes import Sizes, pool_of_checks, pool_text

LAW_STRATEGIES = {
    1: ("tp1",),
    2: ("2*tp1", "tp2", "pp2", "cp2~"),
    4: ("4*tp1", "tp2+2*tp1", "tp2pp2", "cp4~", "pp2+tp2", "tp2cp2"),
    8: ("8*tp1", "tp4+2*tp2", "tp2cp2pp2", "cp8~", "tp2pp3+pp2", "4*pp2"),
}
CHANGING = {
    2: "tp2 | pp2 | 2*tp1",
    4: "tp2+2*tp1 | tp2pp2 | pp2+tp2",
    8: "tp4+2*tp2 | tp2cp2pp2 | pp4+2*tp2",
}
"""Pools whose strategy changes in every iteration; messages of pipelines meet exchanges of
regrouping."""
CONNECTIONS = (1, 8, 32)
"""Values of CUDA_DEVICE_MAX_CONNECTIONS: one hardware queue, CUDA's default, and all there are."""
PRECISIONS = {
    "fp32": "times what rounding allows (rtol 1e-5, atol 1e-6 of a tensor's largest value)",
    "bf16": "times the error of one process in bf16",
}
BOUNDS = {"fp32": 1.0, "bf16": 2.0}
KERNELS = {
    "te": "Transformer Engine's",
    "torch": "torch's varlen_attn (FlashAttention 2)",
}
LEAST_SHARE_OF_PLAIN = 0.97
LEAST_MFU = 0.3
LARGEST_FIT_ERROR = 0.1
LARGEST_PREDICTION_ERROR = 0.1


def num_gpus_used(num_gpus: int) -> int:
    """The largest power of two that there are, up to 8: strategies are written for these."""
    return max(n for n in (1, 2, 4, 8) if n <= num_gpus)


def steps(
    sizes: Sizes, num_gpus: int, *, peak_flops_per_s: float, profile_path: Path
) -> tuple[Step, ...]:
    """Everything that can be checked, in the order of importance.

    Args:
        sizes: real or toy.
        num_gpus: of the machine.
        peak_flops_per_s: of a device, for MFU.
        profile_path: where one step leaves the cost profile for others.
    """
    num = num_gpus_used(num_gpus)
    make = _Maker(sizes, num)
    pool = pool_of_checks(num) if num >= 4 else None
    return (
        make.preflight(),
        make.law(),
        *(make.order(connections) for connections in (CONNECTIONS[0], CONNECTIONS[-1])),
        make.kernels(),
        make.step(
            "profile",
            f"time of micro-batches of {_text(sizes)}, and a formula fitted to it",
            180,
            (
                Figure(
                    key="fit",
                    what="cost profile: |fitted / measured time - 1| of a micro-batch, median",
                    at_most=LARGEST_FIT_ERROR,
                    is_of_device=True,
                ),
                Figure(key="worst fit", what="the same, worst", is_of_device=True),
            ),
            lambda run: programs.profile(run, sizes, profile_path, pool),
        ),
        make.training(
            partial(
                programs.training,
                sizes=sizes,
                profile_path=profile_path,
                peak_flops_per_s=peak_flops_per_s,
            )
        ),
        make.plain(),
        *(make.overlap(connections) for connections in CONNECTIONS),
        make.pool(profile_path),
        make.attention(),
        make.host(),
    )


class _Maker:
    def __init__(self, sizes: Sizes, num: int) -> None:
        self._sizes, self._num = sizes, num

    def step(
        self,
        name: str,
        purpose: str,
        limit_s: float,
        figures: Sequence[Figure],
        run: Callable[[Run], None],
        *,
        least_gpus: int = 1,
    ) -> Step:
        """This step with the limit of these sizes, and why it cannot run with so few GPUs."""
        why_not = ""
        if self._num < least_gpus:
            why_not = f"it needs {least_gpus} GPUs and there {_are(self._num)}"
        limit_s *= self._sizes.limit_factor
        return Step(name, purpose, limit_s, tuple(figures), run, why_not)

    def preflight(self) -> Step:
        figures = [
            Figure(key=key, what=what, unit=unit, is_of_device=True)
            for key, what, unit in (
                ("products", "products of matrices in bf16 on the slowest GPU", "TFLOP/s"),
                ("all_reduce", "sum of 16 MiB over all GPUs: rate of a GPU", "GB/s"),
                ("all_to_all", "exchange of 16 MiB among all GPUs: rate of a GPU", "GB/s"),
            )
        ]

        def run(run: Run) -> None:
            size = ("--matrix-size", str(self._sizes.matrix_size))
            if not self._sizes.matrix_size:
                run.lacks("products", "left out with toy sizes")
            log = run.ranks(self._num, "-m", "megatron.hydraulis", "preflight", *size)[0]
            for name, rate in re.findall(
                r"preflight: (\w+) of .* ([0-9.e+-]+) [TG]\S+/s a rank", log
            ):
                run.measured(name, float(rate))

        purpose = "GPUs of equal speed and versions meet and exchange data correctly"
        return self.step("preflight", purpose, 60, figures, run)

    def law(self) -> Step:
        texts = LAW_STRATEGIES[self._num]
        return self.step(
            "law",
            "the same batch gives the same update under every strategy, and as on the CPU",
            150,
            [
                Figure(
                    key=f"{text} {precision}",
                    what=f"strategy {text}, {precision}: largest error of a gradient or parameter "
                    f"against one CPU process in fp64, {meaning}",
                    unit="x",
                    at_most=BOUNDS[precision],
                )
                for text in texts
                for precision, meaning in PRECISIONS.items()
            ],
            lambda run: self._train_and_compare(run, texts),
        )

    def order(self, connections: int) -> Step:
        text = CHANGING[max(self._num, 2)]
        return self.step(
            f"order-{connections}",
            f"strategies change every iteration, CUDA_DEVICE_MAX_CONNECTIONS={connections}: no "
            "hang, and the same updates",
            90,
            [
                Figure(
                    key=f"{text} {precision}",
                    what=f"{text} in turn, {precision}: ends, and largest error, {meaning}",
                    unit="x",
                    at_most=BOUNDS[precision],
                )
                for precision, meaning in PRECISIONS.items()
            ],
            lambda run: self._train_and_compare(
                run, [text], CUDA_DEVICE_MAX_CONNECTIONS=str(connections)
            ),
            least_gpus=2,
        )

    def _train_and_compare(self, run: Run, texts: Sequence[str], **environment: str) -> None:
        try:
            self._ranks(run, self._num, "law", "train", *texts, **environment)
        finally:
            if (run.folder / "runs").is_dir():
                run.program(
                    *("-m", "benchmarks.gpu.law", str(run.folder)),
                    name="compare",
                    CUDA_VISIBLE_DEVICES="",
                )

    def kernels(self) -> Step:
        error = "largest error of attention and its gradients, bf16 against fp64"
        figures = [
            Figure(key="sdpa", what=f"reference kernel (sdpa): {error}", at_most=0.02),
            *(
                Figure(
                    key=key,
                    what=f"{whose} kernel: {error}, times the reference kernel's",
                    unit="x",
                    at_most=2.0,
                )
                for key, whose in KERNELS.items()
            ),
            *(
                Figure(
                    key=f"engine {key}",
                    what=f"gradients of a model with {what}: error times that with sdpa",
                    unit="x",
                    at_most=2.0,
                )
                for key, what in (
                    ("torch", "torch's attention kernel"),
                    ("te", "Transformer Engine's attention kernel"),
                    ("layers of te", "Transformer Engine's layers and attention kernel"),
                    ("experts of te", "its grouped products of experts and sorting kernels"),
                    ("latents of te", "its layers with latent attention"),
                )
            ),
        ]
        return self.step(
            "kernels",
            "numerics of the attention kernels",
            90,
            figures,
            lambda run: self._ranks(run, 1, "kernels", "run"),
        )

    def training(self, run: Callable[[Run], None]) -> Step:
        figures = [
            Figure(
                key="mfu",
                what="share of the GPU's peak operations that training reaches (MFU)",
                at_least=LEAST_MFU,
                is_of_device=True,
            ),
            Figure(key="tokens/s", what="speed of training", unit="tokens/s", is_of_device=True),
            Figure(
                key="prediction",
                what="time of an iteration: |measured / predicted - 1|, median",
                at_most=LARGEST_PREDICTION_ERROR,
                is_of_device=True,
            ),
            Figure(
                key="memory of the device",
                what="memory trial: measured / predicted memory of the device, reserve included",
                at_most=1.0,
            ),
            Figure(
                key="memory of tensors",
                what="most memory of tensors in training / predicted for the largest micro-batch",
                at_most=1.0,
            ),
            Figure(
                key="loss",
                what="last loss / first loss (random tokens: it stays near ln of the vocabulary)",
                at_most=1.02,
            ),
        ]
        purpose = f"{_text(self._sizes)} in bf16 on one GPU: speed, predictions, memory"
        return self.step("training", purpose, 180, figures, run)

    def plain(self) -> Step:
        texts = [f"{self._num}*tp1"] + ([f"{self._num // 2}*tp2"] if self._num > 1 else [])
        figures = []
        for text in texts:
            scheme = text.split("*")[1]
            figures += [
                Figure(
                    key=f"speed {scheme}",
                    what=f"{text}: tokens/s of this project / of plain Megatron, median of pairs "
                    "of steps in turn",
                    unit="x",
                    at_least=LEAST_SHARE_OF_PLAIN,
                    is_of_device=True,
                ),
                Figure(
                    key=f"loss {scheme}",
                    what=f"{text}: largest relative difference of their losses",
                    at_most=5e-3,
                ),
            ]

        def run(run: Run) -> None:
            for text in texts:
                self._ranks(run, self._num, "paired", "plain", text)

        purpose = "the same static strategy and batches in plain Megatron, step by step in turn"
        return self.step("plain", purpose, 180, figures, run)

    def overlap(self, connections: int) -> Step:
        queues = {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}
        text = f"{max(self._num, 2) // 2}*tp2"
        figures = [
            Figure(
                key="hidden",
                what=f"{text}: share of the waits for parameters and gradients that overlap hides",
                at_least=0.3,
                is_of_device=True,
            ),
            Figure(key="time", what="step with overlap / without", at_most=1.02, is_of_device=True),
            Figure(
                key="loss",
                what="largest relative difference of the losses with and without",
                at_most=5e-3,
            ),
        ]
        return self.step(
            f"overlap-{connections}",
            f"exchange while the GPU computes, CUDA_DEVICE_MAX_CONNECTIONS={connections}",
            90,
            figures,
            lambda run: self._ranks(run, self._num, "paired", "overlap", text, **queues),
            least_gpus=2,
        )

    def pool(self, profile_path: Path) -> Step:
        figures = [
            Figure(
                key="gain",
                what="tokens/s with the pool / with the best of its static strategies, same "
                "batches in turn",
                unit="x",
                at_least=1.0,
                is_of_device=True,
            ),
            Figure(
                key="predicted gain",
                what="the same as predicted by the plans",
                unit="x",
                is_of_device=True,
            ),
            Figure(
                key="prediction",
                what="time of an iteration: |measured / predicted - 1|, median",
                at_most=LARGEST_PREDICTION_ERROR,
                is_of_device=True,
            ),
        ]

        def run(run: Run) -> None:
            path = run.folder / "pool.json"
            path.write_text(pool_text(self._num), encoding="utf-8")
            self._ranks(run, self._num, "pool", "run", str(path), str(profile_path))

        return self.step(
            "pool",
            "a strategy chosen for every batch against each strategy kept for all",
            180,
            figures,
            run,
            least_gpus=4,
        )

    def attention(self) -> Step:
        figures = [
            Figure(
                key=key,
                what=f"{whose} kernel on a packed row of mixed lengths: time / that of a padded "
                "batch",
                unit="x",
                at_most=1.0,
                is_of_device=True,
            )
            for key, whose in KERNELS.items()
        ]
        return self.step(
            "attention",
            "speed of the attention kernels",
            60,
            figures,
            lambda run: self._ranks(run, 1, "attention", "run"),
        )

    def host(self) -> Step:
        figures = [
            Figure(
                key=f"host {way}",
                what=f"host time of a layer and micro-batch, forward and backward: {way}",
                unit="ms",
                is_of_device=True,
            )
            for way in ("torch", "te", "layers of te", "experts of te", "latents of te")
        ]
        return self.step(
            "host",
            "host time of a layer, which cost_model/host.py assumes",
            90,
            figures,
            lambda run: self._ranks(run, 1, "host", "run"),
        )

    def _ranks(
        self, run: Run, num_ranks: int, module: str, function: str, *words: str, **env: str
    ) -> None:
        run.ranks(
            num_ranks,
            *("-m", "benchmarks.gpu.rank", *self._sizes.options, "--"),
            *(module, function, str(run.folder), *words),
            name=f"{module}_{len(list(run.folder.glob('*.txt')))}",
            **env,
        )


def _text(sizes: Sizes) -> str:
    return f"a model of {sizes.model.shape.num_parameters / 1e9:.2g} B parameters"


def _are(num: int) -> str:
    return "is 1" if num == 1 else f"are {num}"
