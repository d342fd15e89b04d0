"""Launch scripts of Megatron become the command to run here."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from megatron.hydraulis.__main__ import main
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.flags import convert
from megatron.hydraulis.flags.convert import read_options, recorded_calls
from tests.support.launch_arguments import SETS, options_of

_MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --lr 1e-3 "
    "--global-batch-size 8 --train-iters 10 --max-position-embeddings 128"
)


@pytest.mark.parametrize("name", SETS)
def test_a_file_of_options_has_those_options(name: str) -> None:
    assert read_options(SETS[name]) == tuple(word for option in options_of(name) for word in option)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("--a 1 \\\n# comment\n--b '2 3' # c\n--c \\", "--a 1 --b '2 3' --c"),
        ("--a 1 \\\r\n  # --b 2\r\n--c x#y\r\n\\\n   ", "--a 1 --c 'x#y'"),
        ("--moe-layer-freq ([0]*3+[1]*58)\n--b '$X'", "--moe-layer-freq '([0]*3+[1]*58)' --b '$X'"),
        (
            '#!/bin/bash\nMODEL_ARGS=(\n  --a "1" # c\n  --freq ([0]*3+[1]*5)\n --b ""\n)\n'
            'MORE+=( --c ${BASE:-10000} "${MODEL_ARGS[@]}")\nEND=(--d)',
            "--a 1 --freq '([0]*3+[1]*5)' --b '' --c 10000 --d",
        ),
        ("A=\" \\\n --a 1 \\\n --b '2 3' \"\nB='--c'", "--a 1 --b '2 3' --c"),
    ],
)
def test_options_and_arrays_are_read_as_text(text: str, options: str, tmp_path: Path) -> None:
    path = tmp_path / "options"
    path.write_bytes(text.encode())
    assert read_options(path) == tuple(shlex.split(options))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("torchrun pretrain_gpt.py --lr 1", r"'torchrun', .* convert -- bash .*options"),
        ("A=(--lr 1)\ntorchrun pretrain_gpt.py ${A[@]}", "'torchrun'"),
        ("A=(--lr $LR)", r"'\$LR'"),
        ("--save out/`date`", "`date`"),
        ("X=ab\n" + "X=$X$X\n" * 40 + "A=(--lr $X)", "'X=ab'"),
        ("\n--name it's", "line 2 has no end"),
        ("--a " * (1 << 19), "at most 1,048,576 characters"),
    ],
)
def test_text_that_is_not_options_alone_is_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "options"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=says):
        read_options(path)


def test_a_device_or_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no regular file"):
        read_options(Path("/dev/zero"))
    with pytest.raises(ConfigurationError, match="No such file"):
        read_options(tmp_path / "none")


_POSITIONAL = r"""
set -euo pipefail
[ "$1" = dsw ] || exit 1
[ $2 = 8B ] && LAYERS=32
mkdir -p out
GPUS=`python -c "print(8)"`
run_cmd="torchrun --nproc_per_node $GPUS pretrain_gpt.py --num-layers ${LAYERS} \
 --lr ${3} "
eval ${run_cmd}
"""
_ARRAYS = r"""
source "$(dirname "$0")/env.sh"
module load cuda || true
ARGS=(--num-layers 12 # a comment
  --lr $LR)
$LAUNCH pretrain_gpt.py "${ARGS[@]}" --wandb-exp-name "a run" \
  --data-path ${DATA[*]} \
"""
_SLURM = r"""#!/bin/bash
#SBATCH -N 2 --ntasks-per-node=1
#SBATCH --gres=gpu:a100:4  # whole nodes
set -eu
export ARGS="--num-layers 2 --hidden-size 64"
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
first=$(srun -n 1 echo first)
srun --label -N $SLURM_NNODES bash -c 'torchrun --nnodes $SLURM_NNODES --nproc-per-node gpu \
  --node_rank $SLURM_PROCID --master_addr $MASTER_ADDR pretrain_gpt.py $ARGS --save '"$first" | cat
"""
_BATCH = r"""
LR=5
sbatch <<END
#!/bin/bash
#SBATCH -N 3
srun --ntasks-per-node 4 python -u pretrain_gpt.py --lr $LR --save \$SLURM_NNODES
END
"""
_PBS = r"""#!/bin/bash
#PBS -l select=2:ncpus=16:ngpus=8:mpiprocs=8
mpirun -np $(($(wc -l < $PBS_NODEFILE) * 8)) --map-by ppr:8:node python pretrain_gpt.py --lr 1
"""
_VENV = f"""
export PYTHONPATH=/nowhere PATH={shlex.quote(os.path.dirname(sys.executable))}:$PATH
torchrun --nproc-per-node 2 pretrain_gpt.py --lr 1
"""
_BY_PATH = f"""
N=$({shlex.quote(sys.executable)} -c 'print(3)')
{shlex.quote(sys.executable)} -m torch.distributed.run --nproc-per-node $N pretrain_gpt.py --lr 1
"""
_ELSEWHERE = r"""
docker rm -f env.sh
for host in a b; do
  ssh $host "cd / && torchrun --nnodes 2 --nproc-per-node 4 pretrain_gpt.py --lr 1" &
done
wait
"""


@pytest.mark.parametrize(
    ("script", "launcher", "options", "num_ranks"),
    [
        (_POSITIONAL, "torchrun --nproc_per_node 8", "--num-layers 32 --lr 1e-5", 8),
        (
            _ARRAYS,
            "torchrun --nproc-per-node=2",
            "--num-layers 12 --lr 3 --wandb-exp-name 'a run' --data-path 1 a 2 b",
            2,
        ),
        (
            _SLURM,
            "torchrun --nnodes 2 --nproc-per-node gpu --node_rank 0 --master_addr node0",
            "--num-layers 2 --hidden-size 64 --save first",
            8,
        ),
        (_BATCH, "python -u", "--lr 5 --save 3", 12),
        (_PBS, "python", "--lr 1", 16),
        (_VENV, "torchrun --nproc-per-node 2", "--lr 1", 2),
        (_BY_PATH, f"{sys.executable} -m torch.distributed.run --nproc-per-node 3", "--lr 1", 3),
        (_ELSEWHERE, "torchrun --nnodes 2 --nproc-per-node 4", "--lr 1", 8),
    ],
    ids=["positional", "arrays", "slurm", "batch", "pbs", "venv", "by_path", "elsewhere"],
)
def test_a_script_runs_up_to_its_launcher(
    script: str,
    launcher: str,
    options: str,
    num_ranks: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "PBS_"))]:
        monkeypatch.delenv(name)
    Path("env.sh").write_text("LR=3 DATA=(1 a 2 b) LAUNCH='torchrun --nproc-per-node=2'")
    Path("train.sh").write_text(script)
    (call,) = recorded_calls(["bash", "train.sh", "dsw", "8B", "1e-5"])
    assert call.options == tuple(shlex.split(options))
    assert shlex.join(call.launcher) == launcher
    assert call.num_ranks == num_ranks
    assert Path("env.sh").exists()
    assert Path("out").exists() == (script is _POSITIONAL)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo no more; exit 3", r"(?s)exited with status 3 and called no launcher.*no more"),
        ("torchrun eval.py --x 1", "called 'torchrun eval.py'|called torchrun eval.py"),
        ("set -u; torchrun pretrain_gpt.py --lr $LR", "(?s)LR.*unbound variable"),
        ("X=ab; for i in $(seq 40); do X=$X$X; done; python pretrain_gpt.py $X", "no launcher"),
        ("sleep 60", "ended after 1 s"),
        ("while :; do echo yes; done", "ended after 1 s"),
    ],
)
def test_a_script_that_reaches_no_launcher_is_an_error(
    script: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "_MOST_MEMORY_BYTES", 1 << 28)
    limit_s = 1 if "ended after" in says else 60
    with pytest.raises(ConfigurationError, match=says):
        recorded_calls(["bash", "-c", script], limit_s)


def test_a_command_that_cannot_be_run_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("torchrun pretrain_gpt.py")
    with pytest.raises(ConfigurationError, match=r"Permission denied; give .* -- bash .*train\.sh"):
        recorded_calls([str(tmp_path / "train.sh")])


def test_calls_outlive_a_script_that_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    (call,) = recorded_calls(["bash", "-c", "torchrun pretrain_gpt.py --lr 1; sleep 60"], 3)
    assert call.options == ("--lr", "1")
    assert "ended after 3 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("launcher", "num_ranks"),
    [
        ("srun -N 2 --ntasks-per-node 8 python", 16),
        ("srun -N 2 --gpus-per-node=a100:4 python", 8),
        ("srun -N9 env X=1 srun -N2 --ntasks-per-node=4 python", 8),
        ("mpirun -np 4 -x PATH python", 4),
        ("srun -N 3 --gres gpu:4 torchrun --nproc_per_node=gpu --nnodes $(echo x)", 12),
        ("srun -N 2 torchrun --nproc-per-node 4", 4),
        ("python", None),
        ("accelerate launch --num_processes 4", None),
    ],
)
def test_ranks_are_those_of_the_launchers(launcher: str, num_ranks: int | None) -> None:
    (call,) = recorded_calls(["bash", "-c", f"{launcher} pretrain_gpt.py --lr 1"])
    assert call.num_ranks == num_ranks


def _converted(capsys: pytest.CaptureFixture[str], script: str, *arguments: str) -> tuple[int, str]:
    """The exit status of ``hydraulis convert`` and what it prints."""
    status = main(["convert", *arguments, "--", "bash", "-c", script])
    return status, capsys.readouterr().out


def _blocks(shown: str) -> dict[str, list[str]]:
    """The lines of each block of what is printed."""
    blocks: dict[str, list[str]] = {}
    name = ""
    for line in shown.partition("\n\n")[0].splitlines():
        if line.startswith("  "):
            blocks[name].append(line.strip())
        else:
            name = line.split()[0]
            blocks[name] = []
    return blocks


def test_convert_prints_the_command_and_what_becomes_of_each_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.sh"
    script.write_text(f"torchrun --nproc_per_node=$1 /m/pretrain_gpt.py {_MODEL} --bf16 \\\n $2")
    more = f"--micro-batch-size 2 --save '{tmp_path}/$(date)'"
    assert main(["convert", "--", "bash", str(script), "8", more]) == 0
    shown, notice = capsys.readouterr()
    assert "train.sh 8" in notice
    assert "rm" in notice
    for text in (
        "torchrun --nproc_per_node=8 --no-python hydraulis train \\\n    --num-layers 2 \\\n",
        "  --micro-batch-size 2: packing decides",
        "  --hidden-dropout 0.0 (Megatron: --hidden-dropout 0.1): ",
        "strategy     --strategy '8*tp1' on 8 ranks equals",
        "takes the place of /m/pretrain_gpt.py",
        "--num-ranks 8 --dry-run",
    ):
        assert text in shown, text
    script.write_text(script.read_text().replace("--bf16", "--fp16"))
    assert main(["convert", "--", "bash", str(script), "8", ""]) == 1
    shown = capsys.readouterr().out
    assert "  --fp16 is not honoured: " in shown
    assert "torchrun" not in shown


def test_a_file_alone_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.sh"
    script.write_text(f"touch {tmp_path}/ran\ntorchrun pretrain_gpt.py {_MODEL}")
    assert main(["convert", str(script)]) == 2
    assert not (tmp_path / "ran").exists()
    assert main(["convert"]) == main(["convert", str(script), "--", "bash", str(script)]) == 2
    assert not (tmp_path / "ran").exists()
    script.write_text(f"MODEL_ARGS=(\n{_MODEL}\n)")
    capsys.readouterr()
    assert main(["convert", str(script), "--num-ranks", "4"]) == 0
    shown, notice = capsys.readouterr()
    assert "torchrun [TORCHRUN OPTIONS] --no-python hydraulis train" in shown
    assert notice == ""


def test_one_of_several_calls_is_converted(capsys: pytest.CaptureFixture[str]) -> None:
    script = f"""
        python tools/convert.py --num-layers 2 --hidden-size 64
        for rate in 1 2 2; do torchrun pretrain_gpt.py {_MODEL} --min-lr 1e-$((rate + 3)); done"""
    status, shown = _converted(capsys, script, "--call", "2")
    assert status == 0, shown
    assert [line.partition(" with ")[0] for line in _blocks(shown)["calls"]] == [
        "1: pretrain_gpt.py",
        "2: pretrain_gpt.py",
        "3: tools/convert.py",
    ]
    assert "--min-lr 1e-5" in shown.partition("\n\n")[2]
    assert _converted(capsys, script, "--call", "4")[0] == 2


def test_ranks_that_a_layout_does_not_divide_have_no_strategy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = (
        "srun python pretrain_gpt.py --lr 1 --tensor-model-parallel-size 8 "
        "--pipeline-model-parallel-size 3"
    )
    status, shown = _converted(capsys, script, "--num-ranks", "16")
    assert status == 1
    assert "  strategy of tp8pp3 alone: replicas of 24 ranks do not fill" in shown
    assert "\nstrategy" not in shown
    assert "give --num-ranks N" in _converted(capsys, script)[1]


def test_experts_of_a_script_are_shared_as_in_training(capsys: pytest.CaptureFixture[str]) -> None:
    script = (
        "srun python pretrain_gpt.py --num-experts 8 --tensor-model-parallel-size 2 "
        "--expert-model-parallel-size 4"
    )
    shown = _converted(capsys, script, "--num-ranks", "8")[1]
    assert "--strategy 'tp2cp4~ep8' on 8 ranks" in shown
    assert "in Megatron a rank holds" not in shown
    shown = _converted(capsys, script.replace("-experts 8", "-experts 4"), "--num-ranks", "8")[1]
    assert "\nwarning      experts: in Megatron a rank holds 1/8 of each" in shown


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--max-position-embeddings 8", "--max-position-embeddings is 8 and --seq-length"),
        (
            "--multi-latent-attention --position-embedding-type rope --rotary-interleaved",
            "remove --rotary-interleaved",
        ),
        ("--tensor-model-parallel-size 8", "tp must divide the attention heads"),
        ("--pipeline-model-parallel-size 4", "pp4"),
        ("--context-parallel-size 8 --cp-comm-type a2a", "use --cp-comm-type auto"),
        (
            "--tensor-model-parallel-size 4 --vocab-size 10 --make-vocab-size-divisible-by 2",
            "every tp must divide the padded vocabulary size",
        ),
        ("--tensor-model-parallel-size 4 --ffn-hidden-size 90", "divide the ffn hidden size"),
        ("--sft --tokenizer-type NullTokenizer --data-path d", "needs --tokenizer-type SFT"),
        ("--data-path a b 2 c", "a blend gives a weight to every prefix"),
        ("--data-path a --train-data-path b", "both name the training corpus"),
        ("--global-batch-tokens 256", "both size the global batch"),
    ],
)
def test_a_command_that_training_would_refuse_is_not_printed(
    typed: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = tmp_path / "options"
    options.write_text(f"{_MODEL} {typed}")
    assert main(["convert", str(options), "--num-ranks", "8"]) == 1
    shown = capsys.readouterr().out
    (line,) = _blocks(shown)["refused"]
    assert says in line
    assert "hydraulis train \\" not in shown
