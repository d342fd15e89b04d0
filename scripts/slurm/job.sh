# shellcheck shell=bash
# Sourced by the Slurm scripts of this folder: the settings of a job, what is checked before it
# starts, how its ranks are started, warned and ended, and how it is requeued. Settings are
# environment variables, so that one script serves every cluster; `print_settings` names all of them.

# shellcheck source=where_to_start.sh
source "$(dirname "${BASH_SOURCE[0]}")/../where_to_start.sh"
# shellcheck source=flags.sh
source "$(dirname "${BASH_SOURCE[0]}")/../flags.sh"

has_flag() {
    local name="$1" argument
    shift
    for argument in "$@"; do
        [[ $argument != "$name" && $argument != "$name="* ]] || return 0
    done
    return 1
}

say() {
    echo "$(date -Is) $*"
}

fail() {
    echo "error: $*" >&2
    exit 2
}

# Checks the settings that are counts against their minimum.
check_counts() {
    local setting name least
    for setting in num_nodes:1 ranks_per_node:1 min_nodes:1 master_port:1 max_restarts:0 \
        max_requeues:0 exit_grace_s:1 rendezvous_timeout_s:1 preflight_timeout_s:1 save_interval:1; do
        name="${setting%:*}" least="${setting#*:}"
        if ! [[ ${!name} =~ ^[0-9]+$ ]] || ((${!name} < least)); then
            fail "${name^^} must be an integer of at least $least but is '${!name}'; correct it"
        fi
    done
    if ((min_nodes > num_nodes)); then
        fail "MIN_NODES is $min_nodes but the job has $num_nodes nodes; set at most $num_nodes"
    fi
}

# Completes program_flags by the given ones and by --load: a job that has a checkpoint resumes from
# it, whatever it started from. So do ranks that torchrun restarts (rank.sh).
choose_where_to_start() {
    local elsewhere
    export HYDRAULIS_RESUME_FROM="$save_dir"
    if ! holds_checkpoint "$save_dir"; then
        program_flags+=("$@")
        [[ -z $save_dir ]] || has_flag --load "$@" || program_flags+=(--load "$save_dir")
        return
    fi
    elsewhere="$(flag_value --load "$@")"
    if has_flag --ckpt-step "$@" && [[ ${elsewhere:-$save_dir} -ef $save_dir ]]; then
        fail "a restarted job takes the latest checkpoint, but --ckpt-step names another of" \
            "CHECKPOINT_DIR $save_dir; set a new CHECKPOINT_DIR and give --load $save_dir with it"
    fi
    resume_from "$save_dir" "${program_flags[@]}" "$@"
    program_flags=("${resuming[@]}")
}

# Settings from variables, or their defaults; arguments are the flags of pretrain_gpt.py.
resolve_settings() {
    local nodes=() variable
    root="${HYDRAULIS_ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}"
    [[ -f $root/pretrain_gpt.py && -f $root/scripts/node.sh ]] ||
        fail "the folder of the repository has pretrain_gpt.py and scripts/node.sh but '$root' does" \
            "not; submit from it or set HYDRAULIS_ROOT to it"
    job_id="${SLURM_JOB_ID:-0}"
    restart="${SLURM_RESTART_COUNT:-0}"
    if [[ -n ${SLURM_JOB_NODELIST:-} ]]; then
        mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    fi
    # Outside a job, that is with --dry-run on a login node, NUM_NODES stands for the allocation.
    num_nodes="${NUM_NODES:-1}"
    ((${#nodes[@]} == 0)) || num_nodes="${#nodes[@]}"
    # salloc only passes on what was requested, which may be `a100:8`.
    ranks_per_node="${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-}}}"
    ranks_per_node="${ranks_per_node##*:}"
    [[ -n $ranks_per_node ]] ||
        fail "Slurm names no GPUs to assign ranks to; set RANKS_PER_NODE"

    container_image="${CONTAINER_IMAGE:-}"
    container_mounts="${CONTAINER_MOUNTS:-$root:$root}"
    setup_script="${SETUP_SCRIPT:-}"
    [[ -z $setup_script || $setup_script == /* ]] || setup_script="$root/$setup_script"
    [[ -z $setup_script || -f $setup_script ]] ||
        fail "SETUP_SCRIPT is a file that every node sources but $setup_script is none; correct it"
    numa_binding="${NUMA_BINDING:-}"
    python="${PYTHON:-}"
    if [[ -z $python ]]; then
        python=python3
        [[ -n $container_image || ! -x $root/.venv/bin/python ]] || python="$root/.venv/bin/python"
    fi
    # srun may start in another folder, and torchrun needs a path that is valid there.
    [[ $python != */* || $python == /* ]] || python="$root/$python"

    # Output folders. Flags take precedence over variables.
    run_dir="$(flag_value --run-dir "$@")"
    run_dir="${run_dir:-${RUN_DIR:-runs/$job_id}}"
    [[ $run_dir == /* ]] || run_dir="$root/$run_dir"
    save_dir="$(flag_value --save "$@")"
    save_dir="${save_dir:-${CHECKPOINT_DIR-$run_dir/checkpoints}}"
    [[ -z $save_dir || $save_dir == /* ]] || save_dir="$root/$save_dir"
    save_interval="${SAVE_INTERVAL:-500}"
    log_dir="$run_dir/logs/start-$restart"

    # The rendezvous of the job; nothing else computes it.
    master_port="${MASTER_PORT:-$((20000 + job_id % 10000))}"
    master_addr="${MASTER_ADDR:-}"
    if [[ -z $master_addr ]]; then
        master_addr="${nodes[0]:-localhost}"
        # The network may not resolve a node's name, but knows its address.
        if ((${#nodes[@]})) && ! getent hosts "$master_addr" >/dev/null; then
            master_addr="$(scontrol show node --oneliner "${nodes[0]}" |
                sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')"
        fi
    fi

    min_nodes="${MIN_NODES:-$num_nodes}"
    max_restarts="${MAX_RESTARTS:-$([[ -n $save_dir ]] && echo 3 || echo 0)}"
    max_requeues="${MAX_REQUEUES:-100}"
    exit_grace_s="${EXIT_GRACE_S:-240}"
    rendezvous_timeout_s="${RENDEZVOUS_TIMEOUT_S:-600}"
    preflight="${PREFLIGHT:-1}"
    preflight_timeout_s="${PREFLIGHT_TIMEOUT_S:-180}"
    check_counts

    # With a GPU the ranks' CPU threads have little to do.
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
    # torchrun and Python read these; values from the submitting shell would be wrong.
    for variable in RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE; do
        unset "$variable"
    done

    program_flags=(--exit-signal-handler)
    has_flag --run-dir "$@" || program_flags+=(--run-dir "$run_dir")
    if [[ -n $save_dir ]]; then
        has_flag --save "$@" || program_flags+=(--save "$save_dir")
        has_flag --save-interval "$@" || program_flags+=(--save-interval "$save_interval")
    fi
    if [[ -n ${MIN_NODES:-} ]]; then
        # Strategies are written for all nodes, but a requeued job may get fewer.
        has_flag --elastic "$@" || program_flags+=(--elastic)
        # If the node of rank 0 is lost, the others must not keep using its address.
        export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    fi
    choose_where_to_start "$@"

    # Ranks do not read the terminal.
    step=(srun --nodes "$num_nodes" --ntasks-per-node 1 --input=none)
    if ((min_nodes < num_nodes)); then
        # If a node is lost, the others continue.
        step+=(--no-kill --kill-on-bad-exit=0)
    else
        step+=(--kill-on-bad-exit=1)
    fi
    # Without this option srun gives a task one CPU: name the job's number, else all CPUs that the job has
    # on its first node, which salloc passes on as `64(x2)`. Slurm binds nothing: torchrun does, if
    # NUMA_BINDING is set.
    cpus="${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-${SLURM_JOB_CPUS_PER_NODE:-}}}"
    cpus="${cpus%%[(,]*}"
    [[ -z $cpus ]] || step+=(--cpus-per-task "$cpus" --cpu-bind none)
    if [[ -n $container_image ]]; then
        step+=(--container-image="$container_image" --container-mounts="$container_mounts"
            --container-workdir="$root")
    else
        step+=(--chdir="$root")
    fi
    setup=()
    # shellcheck disable=SC2016  # the node's shell expands these
    [[ -z $setup_script ]] || setup=(bash -c 'source "$0" && exec "$@"' "$setup_script")
    launcher=(--nnodes "$num_nodes" --nproc-per-node "$ranks_per_node")
    ((min_nodes == num_nodes)) || launcher[1]="$min_nodes:$num_nodes"
    [[ -z $numa_binding ]] || launcher+=(--numa-binding "$numa_binding")
    launcher+=(--rdzv-backend c10d --rdzv-endpoint "$master_addr:$master_port")
}

print_settings() {
    cat <<EOT
job              $job_id, restart $restart, nodes ${SLURM_JOB_NODELIST:-(none: not in a job)}
NUM_NODES        $num_nodes
RANKS_PER_NODE   $ranks_per_node
MIN_NODES        $min_nodes
MASTER_ADDR      $master_addr
MASTER_PORT      $master_port
HYDRAULIS_ROOT   $root
PYTHON           $python
RUN_DIR          $run_dir
CHECKPOINT_DIR   ${save_dir:-(none: no checkpoints)}
SAVE_INTERVAL    $save_interval
MAX_RESTARTS     $max_restarts
MAX_REQUEUES     $max_requeues
EXIT_GRACE_S     $exit_grace_s
RENDEZVOUS_TIMEOUT_S $rendezvous_timeout_s
PREFLIGHT        $preflight
PREFLIGHT_TIMEOUT_S  $preflight_timeout_s
CONTAINER_IMAGE  ${container_image:-(none)}
CONTAINER_MOUNTS $container_mounts
SETUP_SCRIPT     ${setup_script:-(none)}
NUMA_BINDING     ${numa_binding:-(none)}
OMP_NUM_THREADS  $OMP_NUM_THREADS
CUDA_DEVICE_MAX_CONNECTIONS ${CUDA_DEVICE_MAX_CONNECTIONS:-(by the strategies)}
logs of ranks    $log_dir/rank-NNNN.log
EOT
    printf 'step            '
    printf ' %q' "${training_step[@]}"
    printf '\n'
}

# The training command as one array.
compose_training() {
    training_step=("${step[@]}" "${setup[@]}"
        bash "$root/scripts/node.sh" "${launcher[@]}"
        --rdzv-id "$job_id-$restart" --max-restarts "$max_restarts"
        --rdzv-conf "join_timeout=$rendezvous_timeout_s" -- pretrain_gpt.py "${program_flags[@]}")
}

# --dry-run of the program on one node: shows what would run, or what is wrong with the flags.
describe_run() {
    local command=("$python" pretrain_gpt.py "${program_flags[@]}" --dry-run
        --num-ranks "$((num_nodes * ranks_per_node))" --ranks-per-node "$ranks_per_node")
    if [[ -n ${SLURM_JOB_ID:-} ]]; then
        srun --nodes 1 --ntasks 1 --input=none "${step[@]:6}" "${setup[@]}" "${command[@]}"
    elif [[ -n $container_image ]]; then
        echo "the flags are checked in the container after the job has started"
    else
        (cd "$root" && "${command[@]}")
    fi
}

# Checks that every node answers and sees the same files, the flags are valid, and collectives work.
run_preflight() {
    local folder="$run_dir/preflight-$job_id-$restart" node missing=() status=0
    say "pre-flight 1 of 3: every node starts Python and writes to the run folder"
    mkdir -p "$folder"
    # shellcheck disable=SC2016  # the node's shell expands these
    timeout --kill-after=10 "$preflight_timeout_s" "${step[@]}" --kill-on-bad-exit=0 \
        "${setup[@]}" bash -c '
        node="${SLURMD_NODENAME:-$(hostname)}"
        [[ $node != "$3" ]] || "$1" -c "
import socket, sys
try:
    socket.create_server((\"\", int(sys.argv[1])))
except OSError as error:
    sys.exit(f\"error: MASTER_PORT {sys.argv[1]} cannot be used ({error.strerror}); set another\")
" "$4" || exit 1
        "$1" -W ignore -c "import torch, megatron.core, highspy" && : >"$2/$node"
    ' node "$python" "$folder" "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)" \
        "$master_port" || status=$?
    while IFS= read -r node; do
        [[ -e $folder/$node ]] || missing+=("$node")
    done < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    rm -rf "$folder"
    if ((${#missing[@]})); then
        fail "pre-flight: each of $num_nodes nodes must start $python, import this package's" \
            "dependencies and write to $run_dir within $preflight_timeout_s s, but" \
            "${#missing[@]} did not: ${missing[*]}; see their output above, exclude them" \
            "by sbatch --exclude, or correct PYTHON, RUN_DIR or CONTAINER_MOUNTS"
    fi
    say "pre-flight 2 of 3: the flags, with --dry-run"
    describe_run || fail "pre-flight: pretrain_gpt.py refuses these flags, see above; correct them"
    say "pre-flight 3 of 3: two collectives among $((num_nodes * ranks_per_node)) ranks"
    status=0
    # Started like training, with the same limits and variables, but it loads no checkpoint.
    HYDRAULIS_RESUME_FROM='' timeout --kill-after=10 "$((2 * preflight_timeout_s))" \
        "${step[@]}" "${setup[@]}" bash "$root/scripts/node.sh" "${launcher[@]}" \
        --rdzv-id "preflight-$job_id-$restart" --max-restarts 0 \
        --rdzv-conf "join_timeout=$preflight_timeout_s" \
        -- -m megatron.hydraulis preflight --timeout "$preflight_timeout_s" || status=$?
    ((status == 0)) ||
        fail "pre-flight: two collectives among $((num_nodes * ranks_per_node)) ranks on $num_nodes" \
            "nodes ended with status $status, see above; if ranks did not meet, check that nodes" \
            "reach $master_addr:$master_port and set NCCL_SOCKET_IFNAME to the right interface"
}

# The last iteration that metrics.jsonl records, 0 without one.
last_iteration() {
    local found
    found="$(tail -n 1 "$run_dir/metrics.jsonl" 2>/dev/null |
        sed -n 's/.*"iteration": *\([0-9]*\).*/\1/p')"
    echo "${found:-0}"
}

saved_iteration() {
    local found=''
    if [[ -n $save_dir && -f $save_dir/latest_checkpointed_iteration.txt ]]; then
        found="$(<"$save_dir/latest_checkpointed_iteration.txt")"
    fi
    [[ $found =~ ^[0-9]+$ ]] || found=0
    echo "$found"
}

# Requeues the job, unless it is done, was requeued too often or makes no progress.
requeue_job() {
    local last saved train_iters
    last="$(last_iteration)" saved="$(saved_iteration)"
    train_iters="$(flag_value --train-iters "${program_flags[@]}")"
    if [[ $train_iters =~ ^[0-9]+$ ]] && ((last >= train_iters)); then
        say "all $train_iters iterations are done; not requeued"
        return 0
    fi
    if ((restart >= max_requeues)); then
        say "error: the job was requeued $restart times, the most that MAX_REQUEUES allows, and" \
            "is at iteration $last; raise MAX_REQUEUES" >&2
        return 1
    fi
    if [[ -n $save_dir ]] && ((restart > 0 && saved <= saved_at_start)); then
        say "error: this start saved nothing beyond iteration $saved, and the next one would not either;" \
            "lengthen --time, or lower SAVE_INTERVAL" >&2
        return 1
    fi
    [[ -n $save_dir ]] ||
        say "warning: there are no checkpoints (CHECKPOINT_DIR is empty):" \
            "training restarts from iteration 1" >&2
    say "at iteration $last, saved up to $saved: requeueing job $job_id"
    scontrol requeue "$job_id"
}

# Asks the ranks of the running step to save and end.
tell_training() {
    [[ -z $training ]] || kill -USR1 "$training" 2>/dev/null || true
}

# Runs the job from start to end; arguments are the flags of pretrain_gpt.py.
run_job() {
    local requeues=1 asked='' status=0 training=''
    if [[ ${1:-} == --interactive ]]; then
        requeues=0
        shift
    fi
    resolve_settings "$@"
    compose_training
    if has_flag --dry-run "$@"; then
        print_settings
        describe_run
        return
    fi
    [[ -n ${SLURM_JOB_ID:-} ]] ||
        fail "training runs in a Slurm job and this is not one; use sbatch, or add --dry-run"
    mkdir -p "$log_dir" || fail "RUN_DIR $run_dir cannot be written; set another"
    print_settings
    saved_at_start="$(saved_iteration)"
    export PYTHON="$python" HYDRAULIS_LOG_DIR="$log_dir" EXIT_GRACE_S="$exit_grace_s"

    # USR1 is Slurm's warning before the time limit: save, end, requeue. TERM means a cancelled or
    # pre-empted job: save and end; Slurm decides whether to requeue it.
    # In both cases srun, once it runs, forwards USR1 to every node.
    trap 'asked=USR1; tell_training' USR1
    trap 'asked=TERM; tell_training' TERM INT
    [[ $preflight == 0 ]] || run_preflight
    if [[ -n $asked ]]; then
        say "SIG$asked before training started"
        [[ $asked != USR1 ]] || ((!requeues)) || requeue_job
        return
    fi
    say "training starts: $num_nodes nodes of $ranks_per_node ranks," \
        "rendezvous at $master_addr:$master_port, logs in $log_dir"
    "${training_step[@]}" &
    training=$!
    [[ -z $asked ]] || tell_training
    # A signal interrupts `wait`, not the step, whose status bash keeps.
    while kill -0 "$training" 2>/dev/null; do
        wait "$training" || true
    done
    wait "$training" || status=$?
    trap - USR1 TERM INT
    say "training ended with status $status${asked:+ after SIG$asked}"
    if ((requeues)); then
        if [[ $asked == USR1 ]]; then
            requeue_job || status=1
        elif [[ -z $asked ]] && ((status == 0)) && has_flag --exit-duration-in-mins "$@"; then
            requeue_job || status=1
        fi
    fi
    return "$status"
}
