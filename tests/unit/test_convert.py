"""Launch scripts of Megatron become the command to run here."""

import os
import subprocess
from pathlib import Path

import pytest

from megatron.hydraulis.__main__ import main
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.flags.convert import LaunchCommand, read_launch_command
from megatron.hydraulis.flags.shell_script import Script
from tests.support.launch_arguments import SETS, options_of


@pytest.mark.parametrize("name", SETS)
def test_a_file_of_options_has_those_options(name: str) -> None:
    launch = read_launch_command(SETS[name].read_text())
    assert launch.call.options == tuple(word for option in options_of(name) for word in option)
    assert launch.call.launcher == ()


def _shown_options(launch: LaunchCommand) -> str:
    return launch.script.unknowns.shown(" ".join(launch.call.options))


def _unset(launch: LaunchCommand) -> list[str]:
    """The variables without a value, with their lines."""
    unset = [
        each
        for each in launch.script.unknowns.of("".join(launch.call.options))
        if not each.is_set_by_job
    ]
    return list(dict.fromkeys(f"{each.name or each.source}: {each.where}" for each in unset))


_SCRIPT = r"""
#!/bin/bash
GPUS_PER_NODE=4  # a comment with ' a quote
NUM_NODES=${SLURM_NNODES:-2}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINTS=$1
MODEL_ARGS=(
    --num-layers 12   # a comment
    --hidden-size "512" --num-attention-heads 8
)
if [ "$LONG" = 1 ]; then LENGTH=2048
else
    LENGTH=1024
fi
MODEL_ARGS+=(--seq-length $LENGTH)
OPTIMIZER="
    --lr 6.0e-5 \
    --micro-batch-size 2 --train-iters 10 --global-batch-size 8
"
OPTIMIZER+=" --bf16"
export RUN='a run'
cp pretrain_gpt.py "$CHECKPOINTS"
torchrun --nproc_per_node=$GPUS_PER_NODE --nnodes $NUM_NODES /opt/Megatron-LM/pretrain_gpt.py \
    "${MODEL_ARGS[@]}" $OPTIMIZER --transformer-impl local \
    --tokenizer-special-tokens "<|end|>" --wandb-exp-name "$RUN" \
    --save "${CHECKPOINTS}/x" --data-path $DATA 2>&1 | tee log
echo "pretrain_gpt.py is done"
"""


def test_a_launch_script_is_read_without_being_run() -> None:
    launch = read_launch_command(_SCRIPT, {"1": "/out"})
    assert _shown_options(launch) == (
        "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --lr 6.0e-5 "
        "--micro-batch-size 2 --train-iters 10 --global-batch-size 8 --bf16 "
        "--transformer-impl local "
        "--tokenizer-special-tokens <|end|> --wandb-exp-name a run "
        "--save /out/x --data-path $DATA"
    )
    assert "a run" in launch.call.options
    assert launch.num_ranks == 8
    assert _unset(launch) == ["DATA: used in line 26"]
    assert launch.script.changed == ("LENGTH = 2048, 1024",)
    assert "2048" in read_launch_command(_SCRIPT, {"LENGTH": "2048"}).call.options


@pytest.mark.parametrize(
    "call",
    [
        "CMD=\"torchrun --nproc-per-node 2 pretrain_gpt.py --lr 1 --split '9,1'\"; eval $CMD",
        "bash -c \"torchrun --nproc-per-node 2 \\\n pretrain_gpt.py --lr 1 --split '9,1'; ls\"",
        "run() { torchrun --nproc-per-node 2 pretrain_gpt.py --lr 1 --split 9,1 > log; }",
    ],
)
def test_a_command_handed_to_another_shell_is_found(call: str) -> None:
    launch = read_launch_command(call)
    assert launch.call.options == ("--lr", "1", "--split", "9,1")
    assert launch.num_ranks == 2


@pytest.mark.parametrize(
    ("text", "options", "unset"),
    [
        ("python pretrain_gpt.py --save out/`date`", "--save out/$(date)", []),
        (r"python pretrain_gpt.py --a '$B' c\$d", "--a $B c$d", []),
        ('A=; python pretrain_gpt.py --a ${A:-3} "$@"', "--a 3", []),
        ("--a 1 \\\n# comment\n--b '2 3' # c\n--c", "--a 1 --b 2 3 --c", []),
        ("python pretrain_gpt.py --a $B/${C:?no} $B", "--a $B/${C:?no} $B", ["B", "C"]),
        ('A=(1 "2 3"); python pretrain_gpt.py "${A[@]}" ${A[1]} $A', "1 2 3 2 3 1", []),
        ('python pretrain_gpt.py ${A+"$A"} ${B[@]+"${B[@]}"} "${C:=4}" $C', "4 4", []),
        ("A=3; python pretrain_gpt.py $((A * (2 + 10) / 5 % 4)) $((A*N))", "3 $((A*N))", ["N"]),
        ("A=-7; python pretrain_gpt.py $((A/2)) $((010))", "$((A/2)) $((010))", []),
        ("python pretrain_gpt.py --a 1 > log --b 2", "--a 1 --b 2", []),
    ],
)
def test_quotes_defaults_and_commands_of_the_shell(
    text: str, options: str, unset: list[str]
) -> None:
    launch = read_launch_command(text)
    assert _shown_options(launch) == options
    assert [line.partition(":")[0] for line in _unset(launch)] == unset


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("echo hello", r"calls pretrain_gpt\.py, .* calls none; give"),
        (
            "python pretrain_gpt.py --lr 1\npython pretrain_gpt.py --lr 2",
            "2 different lists of options: line 1 with --lr 1; line 2 with --lr 2; leave one",
        ),
        ("\npython pretrain_gpt.py --a it's", "line 2 is .*it's.; correct it: is a quote"),
    ],
)
def test_a_script_that_cannot_be_read_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        read_launch_command(text)


def test_convert_prints_the_command_and_what_becomes_of_each_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.sh"
    script.write_text(_SCRIPT)
    assert main(["convert", str(script), "--set", "1=/out", "--set", "DATA=/data"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "torchrun --nproc_per_node=4 --nnodes 2 --no-python hydraulis train \\\n    --num-layers",
        "taken        options without effect here",
        "  --micro-batch-size 2: packing decides",
        "  --hidden-dropout 0.0 (Megatron: --hidden-dropout 0.1): ",
        "  LENGTH = 2048, 1024\n",
        "strategy     --strategy '8*tp1' on 8 ranks equals",
        "--num-ranks 8 --dry-run",
    ):
        assert text in shown, text
    script.write_text(_SCRIPT.replace("--bf16", "--fp16"))
    assert main(["convert", str(script)]) == 1
    shown = capsys.readouterr().out
    assert "  --fp16 is not honoured: " in shown
    assert "  DATA: used in line 26\n" in shown
    assert "torchrun" not in shown
    assert main(["convert", str(script), "--set", "DATA"]) == 2
    assert "--set takes NAME=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("condition", "branch"),
    [
        ('[ "$MOCK" = true ]', "otherwise"),
        ("[[ $MOCK == false ]]", "then"),
        ('! [ "$MOCK" = true ]', "then"),
        ('[ ! "$MOCK" == false ]', "otherwise"),
        ('[ -z "" ]', "then"),
        ("[ -n $MOCK ]", "then"),
        ("test ${10:-2} -gt 1", "then"),
        ("[ 2 -lt 1 ]", "otherwise"),
        ('[[ $MOCK == a || $MOCK == "false" && 2 -gt 1 ]]', "then"),
        ("[[ $OUTSIDE == a && $MOCK == true ]]", "otherwise"),
        ("[[ $OUTSIDE == a || $MOCK == false ]]", "then"),
        ("[ 5 -gt -1 ]", "then"),
        # Not known: the last branch counts.
        ('[ "$EMPTY" -gt 1 ]', "otherwise"),
        ('[ "$OUTSIDE" = true ]', "otherwise"),
        ("[ -f pretrain_gpt.py ]", "otherwise"),
        ("[[ $MOCK == f* ]]", "otherwise"),
        ('[ "$MOCK" = false ] && [ -f data ]', "otherwise"),
    ],
)
def test_a_condition_that_is_known_decides_its_branch(condition: str, branch: str) -> None:
    script = f"""
MOCK=false; EMPTY=
if {condition}; then
    if [ 1 = 2 ]; then A="--inner"; fi
    A="--then"; B=(--then)
else A="--otherwise"; B=(--otherwise)
fi
if [ 1 = 1 ]; then :; elif [ "$X" = y ]; then A="--elif"; else A="--else"; fi
python pretrain_gpt.py $A ${{B[@]}}
"""
    assert read_launch_command(script).call.options == (f"--{branch}", f"--{branch}")


def test_a_test_for_the_program_does_not_call_it() -> None:
    script = "if [ ! -f pretrain_gpt.py ]; then exit 1; fi\n[ -f pretrain_gpt.py ]\n"
    launch = read_launch_command(script + "srun python pretrain_gpt.py --lr ${12:-1}", {"12": "3"})
    assert launch.call.options == ("--lr", "3")


def test_ranks_that_a_layout_does_not_divide_have_no_strategy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.sh"
    call = "srun python pretrain_gpt.py --lr 1 --tensor-model-parallel-size 8"
    script.write_text(f"{call} --pipeline-model-parallel-size 3")
    assert main(["convert", str(script), "--num-ranks", "16"]) == 1
    shown = capsys.readouterr().out
    assert "  strategy of tp8pp3 alone: replicas of 24 ranks do not fill" in shown
    assert "\nstrategy" not in shown
    assert main(["convert", str(script)]) == 1
    assert "give --num-ranks N" in capsys.readouterr().out


def test_experts_of_a_script_are_shared_as_in_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        "srun python pretrain_gpt.py --num-experts 8 --tensor-model-parallel-size 2 "
        "--expert-model-parallel-size 4"
    )
    main(["convert", str(script), "--num-ranks", "8"])
    shown = capsys.readouterr().out
    assert "--strategy 'tp2cp4~ep8' on 8 ranks" in shown
    assert "in Megatron a rank holds" not in shown
    script.write_text(script.read_text().replace("-experts 8", "-experts 4"))
    main(["convert", str(script), "--num-ranks", "8"])
    assert "\nwarning      experts: in Megatron a rank holds 1/8 of each" in capsys.readouterr().out


def _converted(
    folder: Path, capsys: pytest.CaptureFixture[str], script: str, *arguments: str
) -> tuple[int, str]:
    """The exit status of ``hydraulis convert`` and what it prints."""
    path = folder / "train.sh"
    path.write_text(script)
    status = main(["convert", str(path), *arguments])
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


_MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --lr 1e-3 "
    "--global-batch-size 8 --train-iters 10 --max-position-embeddings 128"
)
_HOSTILE = r"""#!/bin/bash
#SBATCH -N 4
#SBATCH --ntasks-per-node=1 --gpus-per-node=a100:8   # whole nodes
set -eu
source "$(dirname "$0")/env/data.sh"
MODEL=${1:-8B}
GPUS=${SLURM_GPUS_ON_NODE:-8}; export WORLD=$((GPUS * SLURM_NNODES))
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
usage() { cat <<USAGE
torchrun pretrain_gpt.py --lr LR   # it's only a text
USAGE
}
case "$MODEL" in
  8B|8b) LAYERS=32; HIDDEN=4096 ;;
  70B) LAYERS=80
       HIDDEN=8192 ;;
  *) usage; exit 1 ;;
esac
ARGS=(
    --num-layers $LAYERS --hidden-size "$HIDDEN"  # sizes
    --num-attention-heads $(( HIDDEN / 128 ))
    --tensor-model-parallel-size ${TP:=4} \
    --global-batch-size $((WORLD / TP * 2))
)
add() { local first=$1; shift; ARGS+=("$first" "$@"); }
add --seq-length "${SEQ_LENGTH:-8192}" --max-position-embeddings 8192
add --lr 3e-4 --train-iters 1000 --bf16
mkdir -p ckpt; [ -d ckpt ] && add --load ckpt --eval-interval 5 || true
if [[ "${MOCK:-0}" == 1 ]]; then add --mock-data; else add --data-path "$DATA_ROOT/corpus"; fi
for part in 1 2; do EXTRA="${EXTRA:-} --start-eval-at-iter $part"; done
launch() {
  srun --label --nodes $SLURM_NNODES bash -c "export OMP_NUM_THREADS=1
    torchrun --nnodes $SLURM_NNODES --nproc_per_node $GPUS \
    --node_rank \$SLURM_PROCID --master_addr $MASTER_ADDR \
    pretrain_gpt.py $* --save 'out/my \$RUN' $EXTRA \
    --num-workers 8 2>&1 | cat"
}
launch "${ARGS[@]}" --tokenizer-type NullTokenizer --vocab-size 32000 \
    # --log-interval 10
"""
_DIRECT = r"""
ROOT=/data; ROOT+=/x
MODEL="--num-layers 2 --hidden-size 64 \
  --num-attention-heads 4"
ARGS=($MODEL --seq-length 128 --lr 1e-3 --global-batch-size 8 --train-iters 10)
for weight in 1 2; do BLEND+=" $weight $ROOT/part$weight"; done
NAME="a \$b \"c\" d'e"; LIST=(x)
nodes=($(scontrol show hostnames))
CMD=(python -m torch.distributed.run --nproc-per-node 8)
CMD+=(--master-addr "${nodes[0]}" ../pretrain_gpt.py)
CUDA_DEVICE_MAX_CONNECTIONS=1 MODE="a b" exec "${CMD[@]}" "${ARGS[@]}" --wandb-exp-name "$NAME" \
  --wandb-project p --data-path $BLEND --save ~/$(hostname)/"$HOME"/ckpt ${NONE:-} "$@" \
  --tokenizer-special-tokens ${ROOT:+"a b"} "${LIST[1]}" > log --bf16
"""
_STUBS = {
    "srun": 'while [[ $1 == -* ]]; do [[ $1 == --nodes ]] && shift; shift; done; exec "$@"',
    "torchrun": r"""printf '%s\n' "${OMP_NUM_THREADS:-}" "${MODE:-}" "$@" > "$CALLED" """,
    "python": 'exec torchrun "$@"',
    "scontrol": "echo node7",
}


@pytest.mark.parametrize("script", [_HOSTILE, _DIRECT])
def test_the_command_calls_the_program_as_the_script_does(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script and the command run in bash, with commands that write their arguments."""
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "data.sh").write_text("DATA_ROOT=/data\n")
    (tmp_path / "bin").mkdir()
    for name, body in _STUBS.items():
        stub = tmp_path / "bin" / name
        stub.write_text(f"#!/bin/bash\n{body}\n")
        stub.chmod(0o755)
    status, shown = _converted(tmp_path, capsys, script)
    assert status == 0, shown
    slurm = {"SLURM_NNODES": "4", "SLURM_PROCID": "3", "SLURM_JOB_NODELIST": "node[7-8]"}
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "HOME": "/home/me", **slurm}

    def called(text: str) -> list[str]:
        written = tmp_path / "called"
        subprocess.run(
            ["bash", "-c", text, str(tmp_path / "train.sh")],
            env={**environment, "CALLED": str(written)},
            cwd=tmp_path,
            check=True,
            timeout=60,
        )
        return written.read_text().splitlines()

    theirs = called(script)
    at = next(at for at, word in enumerate(theirs) if word.endswith("pretrain_gpt.py"))
    if "--num-workers" in theirs:  # has no effect
        del theirs[-2:]
    kept = "MASTER_ADDR=node7; nodes=(node7)\n"
    ours = called(kept + shown.partition("\n\n")[2])
    assert ours == [*theirs[:at], "--no-python", "hydraulis", "train", *theirs[at + 1 :]]


@pytest.mark.parametrize(
    "script",
    [
        "X=1; (X=2); CALL $X",
        "X=1; (X=2; CALL $X)",
        "X=1; echo | X=2; CALL $X",
        "X=1; X=2 echo hi; CALL $X",
        "X=1 Y=2\nX=3 \\\n Y=4 true; CALL $X $Y",
        "f() { CALL $X; X=3; }; X=1; X=2 f; CALL $X",
        "X=1; X=2 eval 'CALL $X'",
        "( cd . || exit 1; exit 0 ); CALL 1",
        "f() { local TP=4 N; CALL ${N:-n}; }; TP=2; N=1; f; CALL $TP $N",
        "f() { S=8; return 0; S=16; }; f; CALL $S",
        "f() { if [ 1 = 1 ]; then S=8; return 0; fi; S=16; }; f; CALL $S",
        "for N in 1 2 3; do [ $N = 2 ] && break; done; CALL $N",
        "for N in 1 2 3; do [ $N = 3 ] && continue; M=$N; done; CALL $M",
        "f() { for N in 1 2; do return; done; }; f; CALL $N",
        "for N in 1 2; do for M in 3 4; do break 2; done; done; CALL $N $M",
        "for N in 1 2; do for M in 3 4; do continue 2; done; K=5; done; CALL $N $M ${K:-no}",
        "for N in 1 2; do continue 9; done; CALL $N",
        "for N in 1 2; do for M in 3 4; do break; done; done; CALL $N $M",
        "X=1; X=2 & wait; CALL $X",
        "X=1; X=2 && Y=3 & wait; CALL $X ${Y:-no}",
        "set -- --x 3; CALL $2 $1",
        'f() { set -- --y "$@"; CALL "$@"; }; f 4; CALL $1',
        "set -- $2 $1; shift; CALL $1",
        "shift; CALL $1",
        "M=big; [ $M = big ] && TP=4 || TP=1; CALL $TP",
        "M=big; [ $M = big ] && M=small || M=big; CALL $M",
    ],
)
def test_values_are_those_of_bash(script: str) -> None:
    stub = "call() { printf '%s\\n' \"$*\"; }\n"
    text = stub + script.replace("CALL", "call")
    bash = subprocess.run(
        ["bash", "-c", text, "x", "first", "second"], capture_output=True, text=True, timeout=60
    )
    given = {"1": "first", "2": "second"}
    text = script.replace("CALL", "python pretrain_gpt.py")
    launches = Script(given, {}, Path())
    launches.read_all(text)
    ours = [" ".join(call.options) for call in launches.calls]
    assert ours == [line for line in bash.stdout.splitlines() if line != "hi"]
    assert launches.changed == ()


@pytest.mark.parametrize(
    ("script", "unset"),
    [
        ("N=2; unset N; CALL ${N:-1}", True),
        ("N=(--x 1); N[0]=--y; CALL ${N[0]}", True),
        ("N=16; ((N*=2)); CALL $N", True),
        ("N=16; M=$((N+=2)); CALL $N", True),
        ("N=1; let N=3; CALL $N", True),
        ("N=1; read -r N < file; CALL $N", True),
        ("N=1; printf -v N 2; CALL $N", True),
        ("f() { local -n M=$1; M=2; }; N=1; f N; CALL $N", True),
        ("N=1; declare -n M=N; CALL $N", True),
        (
            "N=1; for M in 1 2; do for K in 3; do [ -d x ] && break 2; done; N=2; done; CALL $N",
            False,
        ),
        ("f() { if [ -d x ]; then N=8; return; fi; N=16; }; f; CALL $N", False),
        ("for N in 1 2; do [ -d x ] && break; done; CALL $N", False),
        ("if [ -d x ]; then N=1; else N=2; fi; N=$N; CALL $N", False),
        ("if [ -d x ]; then N=1; else N=2; fi; (CALL $N)", False),
    ],
)
def test_what_is_not_followed_is_listed(script: str, unset: bool) -> None:
    launch = read_launch_command(script.replace("CALL", "python pretrain_gpt.py"))
    names = [line.partition(":")[0] for line in _unset(launch)]
    changed = [line.partition(" ")[0] for line in launch.script.changed]
    assert (names, changed) == ((["N"], []) if unset else ([], ["N"]))


def test_arguments_that_a_branch_may_set_are_listed() -> None:
    launch = read_launch_command("if [ -d x ]; then set -- --a 2; fi; python pretrain_gpt.py $1")
    assert launch.script.changed == ("$@ = none, --a 2",)


def test_variables_without_a_value_are_named_with_their_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = f"""
ROOT=$BASE/x
LR=$(cat lr)
source env.sh
torchrun --nproc-per-node 2 --rdzv-id $JOB pretrain_gpt.py {_MODEL} --save $ROOT/$NAME \\
  --lr $LR --load $ROOT --wandb-project p --num-workers $CPUS --eval-interval "$EVERY" $EXTRA"""
    status, shown = _converted(tmp_path, capsys, script)
    assert status == 1
    blocks = _blocks(shown)
    assert blocks["unset"] == [
        "JOB: used in line 5",
        "BASE: used in line 2",
        "NAME: used in line 5",
        "LR: line 3 sets it to $(cat lr)",
        "EVERY: used in line 6",
        "EXTRA: used in line 6",
        "line 4 reads env.sh, which is not here",
    ]
    assert "refused" not in blocks
    assert blocks["command"] == []
    given = ("JOB=1", "BASE=/b", "NAME=n", "LR=1", "EVERY=5")
    sets = [word for each in given for word in ("--set", each)]
    status, shown = _converted(tmp_path, capsys, script.replace("$EXTRA", ""), *sets)
    assert status == 0, shown
    assert "  --num-workers $CPUS: each rank reads" in shown


def test_what_only_the_job_knows_stays_in_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = f"""#SBATCH --nodes=2 --gres=gpu:4
RUN=x-$SLURM_JOB_ID
ARGS="{_MODEL} --sft --tokenizer-type SFTTokenizer --data-path $(ls data)"
srun bash -c 'torchrun --nnodes $SLURM_NNODES --nproc-per-node $N --node-rank $RANK \
  pretrain_gpt.py '"$ARGS"' --save '"$RUN"
"""
    status, shown = _converted(tmp_path, capsys, script, "--set", "N=4")
    assert status == 0, shown
    assert _blocks(shown)["kept"] == [
        "RANK: used in line 4",
        "$(ls data): used in line 3",
        "RUN: line 2 sets it to x-$SLURM_JOB_ID",
    ]
    command = shown.partition("\n\n")[2]
    assert command.startswith('srun bash -c "torchrun --nnodes 2 --nproc-per-node 4 --node-rank')
    assert r"--node-rank \$RANK --no-python hydraulis train" in command
    assert "--data-path $(ls data)" in command
    assert '--save ${RUN}"' in command


@pytest.mark.parametrize(
    ("text", "num_ranks"),
    [
        ("#SBATCH -N2\n#SBATCH --ntasks-per-node 8\nsrun python pretrain_gpt.py", 16),
        ("#SBATCH -N 2 --gpus-per-node=a100:4\nsrun python pretrain_gpt.py", 8),
        ("#SBATCH --nodes=9\nsrun -N 2 --ntasks-per-node=4 python pretrain_gpt.py", 8),
        ("#SBATCH -n 6 # not -n 8\nsrun python pretrain_gpt.py", 6),
        ("mpirun -np 4 python pretrain_gpt.py", 4),
        ("torchrun --nproc_per_node=4 --nnodes $SLURM_NNODES pretrain_gpt.py", None),
        (
            "#SBATCH --nodes 3 --gres gpu:4\n"
            "torchrun --nproc_per_node=gpu --nnodes $(wc -l hosts) pretrain_gpt.py",
            12,
        ),
        ("#SBATCH -N 2\ntorchrun --nproc-per-node 4 pretrain_gpt.py", 4),
        ("python pretrain_gpt.py", None),
    ],
)
def test_ranks_are_those_of_the_launcher_and_of_slurm(text: str, num_ranks: int | None) -> None:
    assert read_launch_command(text).num_ranks == num_ranks


@pytest.mark.parametrize(
    ("script", "option"),
    [
        ("run() { python pretrain_gpt.py $2; }; run x --a", "--a"),
        ("run() { python pretrain_gpt.py $A; }; A=--a", "--a"),
        ("run() { run; run; python pretrain_gpt.py --a; }; run", "--a"),
        ("cat > run.sh <<'END'\npython pretrain_gpt.py --a\nEND", "--a"),
        ("A=--a; sbatch <<END\npython pretrain_gpt.py $A\nEND\nA=--b", "--a"),
        ("case $X in 1) A=--b ;; esac; A=--a; python pretrain_gpt.py $A", "--a"),
        ("A=--a; case $X in 1) A=$2 ;; esac; python pretrain_gpt.py $A", "--a"),
        ("while [ $# -gt 0 ]; do A=--a; shift; done; python pretrain_gpt.py $A", "--a"),
        ("A=1; if [ $A = 2 ]; then B='\\\n --b'; fi; python pretrain_gpt.py --a $B", "--a"),
        ("A=1; python pretrain_gpt.py --a; [ $A ] || exit 1; exit; python pretrain_gpt.py", "--a"),
        ("A=1; [ $A = 1 ] && [ $A = 2 ] || A=--a; python pretrain_gpt.py $A", "--a"),
    ],
)
def test_functions_branches_and_here_documents(script: str, option: str) -> None:
    assert read_launch_command(script).call.options == (option,)


def test_long_values_are_shortened_to_where_they_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = f"""
ARGS=({_MODEL})
if [ -d old ]; then ARGS+=(--load old --finetune); SAVE="--save old"; fi
if [ -d c ]; then NAME="{"a " * 40}"; else NAME=b; fi
if [ "$X" = 1 ]; then SEED=; else SEED=" --seed 3"; fi
ARGS+=(--bf16)
torchrun pretrain_gpt.py "${{ARGS[@]}}" $SAVE $SEED --wandb-project "$NAME" """
    status, shown = _converted(tmp_path, capsys, script)
    assert status == 0, shown
    assert _blocks(shown)["changed"] == [
        "ARGS = … --bf16, … --load old --finetune --bf16",
        "SAVE = none, --save old",
        "SEED = none, --seed 3",
        "NAME = a a a a a a a a a a a a a a a a a a a a a a a a a a a a a …, b",
    ]


def test_options_that_no_command_continues_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = f"torchrun pretrain_gpt.py {_MODEL} \\\n # --bf16 \\\n --clip-grad 2\n"
    status, shown = _converted(tmp_path, capsys, script)
    assert status == 1
    (line,) = _blocks(shown)["refused"]
    assert line.startswith("line 3, --clip-grad 2: it belongs to no command, as the line above")


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
        ("--sft --tokenizer-type NullTokenizer --data-path $DATA", "needs --tokenizer-type SFT"),
        ("--data-path a b 2 c", "a blend gives a weight to every prefix"),
        ("--data-path a --train-data-path b", "both name the training corpus"),
        ("--global-batch-tokens 256", "both size the global batch"),
    ],
)
def test_a_command_that_training_would_refuse_is_not_printed(
    typed: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = f"torchrun --nproc-per-node 8 pretrain_gpt.py {_MODEL} {typed}"
    status, shown = _converted(tmp_path, capsys, script)
    assert status == 1
    (line,) = _blocks(shown)["refused"]
    assert says in line
    assert "hydraulis train \\" not in shown
