"""Hashes of upstream's sources that the patches were written for (megatron-core 0.19.2)."""

CPU_BACKEND_HASHES = {
    "megatron.core.rerun_state_machine": "628f955068650527",
    "megatron.core.pipeline_parallel.p2p_communication": "d34aff2655a452e3",
    "megatron.core.pipeline_parallel.schedules": "9d3624f4b1bc8e9e",
    "megatron.core.models.common.embeddings.rotary_pos_embedding": "0c5bca26c50b5599",
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding": "9680720760c4acde",
    "megatron.core.ssm.gated_delta_net.common": "59bb8339adf1498f",
    "megatron.core.tensor_parallel.layers": "f559500986961544",
    "megatron.core.tensor_parallel.mappings": "a91d34138309d787",
    "megatron.core.tensor_parallel.random": "c2bc8b53e27f0a88",
    "megatron.core.tensor_parallel.utils": "931a35e7113d28b6",
    "megatron.core.transformer.moe.router": "1a1b6a2b82dc2883",
    "megatron.core.transformer.moe.token_dispatcher": "7af2746153268f5c",
    "megatron.core.timers": "14e76e6578adf7e6",
    "megatron.core.utils": "c4ed73957e283126",
    "megatron.training.training": "d968ef8216f63d63",
    "megatron.training.initialize": "a9657afc72c7b236",
    "megatron.training.utils.common_utils": "025f22664cdaecc3",
    "megatron.training.dist_signal_handler": "6bbfd7a50305b8fd",
}

RNG_STATE_HASHES = {
    "megatron.core.tensor_parallel.random:_get_cuda_rng_state": "aa26caaa069c5c4f",
    "megatron.core.tensor_parallel.random:_set_cuda_rng_state": "b179c9d95438b61c",
}

DISPATCHED_COUNTS_HASHES = {
    "megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu": "8fc5847a887d7319",
}

GATED_DELTA_NET_HASHES = {"megatron.core.ssm.gated_delta_net.common:HAVE_FLA": "59bb8339adf1498f"}

JIT_FUSER_HASHES = {"megatron.core.jit:enable_jit_fuser": "0714694302faf5a4"}

TRAINING_LOOP_HASHES = {
    "megatron.training.global_vars:_build_tokenizer": "4f6e73c7794fbe3c",
    "megatron.training.training:train_step": "68989d425b2300aa",
    "megatron.training.training:evaluate": "a8be7269bc278373",
    "megatron.training.training:get_megatron_optimizer": "b473223298c43430",
    "megatron.training.training:build_train_valid_test_data_iterators": "d12ed278f953cc10",
    "megatron.training.training:update_train_iters": "bd315d6755703d25",
    "megatron.training.training:consume_seqlen_stats_in_iteration": "11adaf9837000c6c",
    "megatron.training.training:save_checkpoint": "b652984ca8c8309d",
    "megatron.training.training:load_checkpoint": "4f03d48a79382b8c",
    "megatron.training.training:training_log": "5e34a182d566e325",
    "megatron.training.training:print_rank_last": "a408eeba0100cc6c",
    "megatron.training.training:report_theoretical_memory": "8f498c2b52a6fb61",
    "megatron.training.initialize:_compile_dependencies": "6d4b2069952d6210",
    "megatron.training.training:get_forward_backward_func": "9d8e0a75be40fcce",
    "megatron.training.training:set_jit_fusion_options": "fe3ec3dcf2af9e1b",
    "megatron.training.training:report_memory": "ba08bcff29266712",
}
