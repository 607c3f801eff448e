"""verl's keys of rollout, data, rewards and trainer without a counterpart: see `dropped`."""

from __future__ import annotations

from rlctl.recipes.verl import features as missing
from rlctl.recipes.verl.rules import Rule, depends, needs, no_effect, only

_ROLLOUT = "actor_rollout_ref.rollout"
_REWARD = "{reward,reward_model}"
_RM = "{reward.,}reward_model"
_OFF = (None, False)
_EMPTY = (None, {}, [], "")
_SPEED = "it is about speed and changes no number"
_ENGINE = "the engine chooses"

ROLLOUT: tuple[Rule, ...] = (
    only(
        f"{_ROLLOUT}.multi_turn.{{completion_callback,num_repeat_rollouts}}",
        _EMPTY,
        "it is off",
        "an environment (rollout.agent.environment) decides how an episode continues",
    ),
    no_effect(
        f"{_ROLLOUT}.multi_turn.{{use_inference_chat_template,tokenization_sanity_check_mode,"
        "use_xgrammar,enable_tokenization_sanity_check}",
        "token ids are only appended, never tokenized again",
    ),
    needs(
        f"{_ROLLOUT}.agent.{{agent_loop_config_path,agent_loop_manager_class,"
        "custom_async_server.path,custom_async_server.name}",
        missing.AGENT_LOOPS,
        _EMPTY,
    ),
    no_effect(
        f"{_ROLLOUT}.{{enable_chunked_prefill,enable_prefix_caching,disable_log_stats,swap_space,"
        "skip_tokenizer_init,multi_stage_wake_up,cudagraph_capture_sizes,scheduling_policy,"
        "micro_batch_size,moe_load_balance_metrics_interval}",
        f"{_ENGINE}, and it changes no number",
    ),
    no_effect(
        f"{_ROLLOUT}.{{load_format,layered_summon}}",
        "the engine always takes its weights from the trainer",
    ),
    no_effect(
        f"{_ROLLOUT}.{{data_parallel_size,expert_parallel_size,pipeline_model_parallel_size}}",
        "each group of tensor_model_parallel_size ranks has an engine of its own",
    ),
    no_effect(f"{_ROLLOUT}.calculate_log_probs", "the engine always returns log-probs"),
    only(
        f"{_ROLLOUT}.logprobs_mode",
        (None, "processed_logprobs"),
        "log-probs are those of the sampling distribution",
    ),
    only(
        f"{_ROLLOUT}.dtype",
        (None, "bfloat16", "auto"),
        "the engine computes in actor_rollout_ref.model.dtype",
        "set actor_rollout_ref.model.dtype={value}",
    ),
    only(f"{_ROLLOUT}.do_sample", (True,), "responses are sampled"),
    only(f"{_ROLLOUT}.ignore_eos", _OFF, "a response ends at the end-of-sequence token"),
    only(f"{_ROLLOUT}.use_fire_sampling", _OFF, "it is off"),
    only(f"{_ROLLOUT}.full_determinism", _OFF, "it is off", "set trainer.deterministic=true"),
    needs(f"{_ROLLOUT}.{{quantization,quantization_config_file}}", missing.QUANTIZATION, _EMPTY),
    no_effect(
        f"{_ROLLOUT}.enable_rollout_routing_replay",
        "actor_rollout_ref.actor.router_replay.mode=R3 lets the engine record its experts",
    ),
    needs(f"{_ROLLOUT}.{{over_sample_rate,partial_rollout}}", missing.OVER_SAMPLING, (0, *_OFF)),
    needs(f"{_ROLLOUT}.{{skip_rollout,skip.enable}}", missing.SKIPPED_ROLLOUTS, _OFF),
    depends(f"{_ROLLOUT}.{{skip_dump_dir,skip.*}}", "skipping rollouts is off"),
    needs(f"{_ROLLOUT}.disaggregation.enabled", missing.ASYNC, _OFF),
    depends(f"{_ROLLOUT}.disaggregation*", "disaggregated prefill is off"),
    depends(f"{_ROLLOUT}.mtp*", "multi-token prediction is off"),
    no_effect(f"{_ROLLOUT}.prometheus*", "metrics are in metrics.jsonl and the trackers"),
    no_effect(
        f"{_ROLLOUT}.trace*", "responses are saved by trainer.rollout_data_dir, without traces"
    ),
    only(f"{_ROLLOUT}.router_config_path", _EMPTY, "requests are balanced over the engines"),
    only(
        f"{_ROLLOUT}.checkpoint_engine.{{custom_backend_module,engine_kwargs}}",
        _EMPTY,
        "the weight sync is rlctl's own",
    ),
    depends(f"{_ROLLOUT}.limit_images", "rows have no images"),
    depends(
        f"{_ROLLOUT}.engine_kwargs.{{disable_mm_preprocessor_cache,mm_processor_cache_gb,"
        "vllm.disable_mm_preprocessor_cache,vllm.mm_processor_cache_gb,limit_mm_per_prompt*}",
        "rows have no images",
    ),
    needs(f"{_ROLLOUT}.engine_kwargs.trtllm*", missing.TENSORRT),
    no_effect(f"{_ROLLOUT}.engine_kwargs.sglang.attention_backend", _SPEED),
    only(
        f"{_ROLLOUT}.engine_kwargs.sglang*",
        _EMPTY,
        "no argument of SGLang is set",
        "+actor_rollout_ref.rollout.engine_kwargs.server_args=[--NAME,VALUE] adds arguments to "
        "the server",
    ),
)

DATA: tuple[Rule, ...] = (
    no_effect(
        "data.{return_raw_chat,return_raw_input_ids,return_full_prompt,return_multi_modal_inputs}",
        "the chat and the prompt's tokens are always kept",
    ),
    no_effect(
        "data.{dataloader_num_workers,num_workers,filter_overlong_prompts_workers,use_shm}", _SPEED
    ),
    no_effect("data.validation_shuffle", "the order of validation changes no metric"),
    no_effect("data.{balance_dp_token,pad_mode}", "rows are packed and balanced over the ranks"),
    only(
        "data.{image_key,video_key,audio_key}",
        (None, "images", "videos", "audios"),
        "rows with images, videos or audio are refused: the data files must have text rows alone",
        "rows with images, videos or audio are refused under any name of the column",
    ),
    depends("data.{image_patch_size,mm_processor_kwargs*}", "rows have no images"),
    depends(
        "data.{tool_config_path,function_tool_path}",
        "prompts contain the tools of actor_rollout_ref.rollout.multi_turn",
    ),
    needs("data.{custom_cls,datagen}.path", missing.DATASET_CODE, _EMPTY),
    depends("data.{custom_cls,datagen}.name", "no dataset class is set"),
    only(
        "data.sampler.{class_path,class_name}",
        _EMPTY,
        "data.sampler selects the order of the prompts",
        "data.sampler=random, sequential, curriculum, thompson or module:Name",
    ),
    needs("data.multiturn.enable", missing.MULTI_TURN_SFT, _OFF),
    depends("data.multiturn*", "multi-turn fine-tuning is off"),
    needs("data.{messages_key,tools_key}", missing.MULTI_TURN_SFT, _EMPTY),
    depends("data.{enable_thinking_key,enable_thinking_default}", "rows have a single turn"),
    only(
        "data.{max_length,min_response_length,chat_template,ignore_input_ids_mismatch}",
        _OFF,
        "it is off",
        "limits are data.max_prompt_length and data.max_response_length",
    ),
    needs(
        "{data.filter_accuracy,data.accuracy_lower_bound,data.accuracy_upper_bound,"
        "data.oversample_factor,data.filter_truncate,algorithm.reward_gt_coef,"
        "algorithm.reward_dpo_coef,reward_model.mini_batch_size}",
        missing.PRIME,
    ),
    needs(
        "reward_model.model.{update,ref_path,ref_type,beta_train,loss_type,optim*}", missing.PRIME
    ),
)

REWARD: tuple[Rule, ...] = (
    no_effect(
        f"{_RM}.{{model.input_tokenizer,input_tokenizer}}",
        "responses are always rendered in the chat template of the reward model",
    ),
    Rule(
        f"{_RM}{{.model.fsdp_config,.fsdp_config,}}.strategy",
        "models are always sharded by FSDP2, which gives the same numbers",
        ("fsdp", "fsdp2", None),
        missing.REWARD_STRATEGY,
    ),
    no_effect(
        f"{_RM}.{{model.use_remove_padding,model.use_fused_kernels,model.use_shm,"
        "fsdp_config.forward_prefetch,fsdp_config.wrap_policy*}",
        "it changes no number",
    ),
    only(f"{_RM}.model.external_lib", _EMPTY, "no module is imported", "write a plug-in"),
    no_effect(
        f"{_RM}.{{enable_resource_pool,n_gpus_per_node,nnodes,profiler*}}",
        "trainer.placement.reward names the pool of the reward model",
    ),
    no_effect(f"{_RM}.rollout.*", "the reward model runs under FSDP2, not in a rollout engine"),
    depends("reward.reward_model.path", "reward.reward_model.model.path is the model"),
    Rule(
        "{reward_model.reward_manager,reward.reward_manager.name,reward_manager.name,"
        "reward_manager}",
        "responses are scored one by one in reward.num_processes processes",
        (None, "naive", "dapo", "prime", "gdpo", "remote", "rate_limited"),
        missing.REWARD_CODE,
    ),
    only(
        "{reward.reward_manager,reward_manager}.source",
        (None, "register"),
        "a reward is a function",
        "reward.custom_reward_function.path=FILE",
    ),
    needs("{reward.reward_manager,reward_manager}.module.path", missing.REWARD_CODE, _EMPTY),
    depends("{reward.reward_manager,reward_manager}.module.name", "no module is set"),
    no_effect(
        f"{_REWARD}.{{reward_kwargs.overlong_buffer_cfg.log,overlong_buffer.log}}",
        "the penalty has a metric of its own",
    ),
    only(
        f"{_REWARD}.reward_kwargs*",
        _EMPTY,
        "no setting of a reward manager is set",
        "reward.custom_reward_function.reward_kwargs has the arguments of a function",
    ),
    needs(
        "reward_model.{reward_loop_class_name,reward_loop_module_path}",
        missing.REWARD_CODE,
        _EMPTY,
    ),
    no_effect(
        f"{_REWARD}.{{launch_reward_fn_async,num_workers,use_reward_loop,reward_loop_source}}",
        "reward.num_processes sets the number of scoring processes",
    ),
    no_effect(
        "{reward.,reward_model.,}sandbox_fusion*",
        "no scorer runs code: data sources that need a sandbox are refused",
    ),
)

TRAINER: tuple[Rule, ...] = (
    no_effect("{trainer.use_v1,trainer.use_legacy_worker_impl}", "rlctl has one trainer"),
    only(
        "trainer.default_hdfs_dir",
        _EMPTY,
        "it is not set",
        "write trainer.mirror={value}: a remote copy of the run at any fsspec address",
    ),
    no_effect(
        "trainer.{del_local_ckpt_after_load,ray_wait_register_center_timeout,esi_redundant_time}",
        "it is not needed",
    ),
    only(
        "trainer.remove_previous_ckpt_in_save", _OFF, "it is off", "set trainer.max_ckpt_to_keep=1"
    ),
    only("trainer.checkpoint_callback_class", _EMPTY, "no callback is set"),
    only(
        "trainer.profile_interval",
        (None, [-1, -1]),
        "it is off",
        "list the steps: trainer.profile.steps=[10, 20]",
    ),
    needs("global_profiler.tool", missing.PROFILER, (None, "torch")),
    depends("global_profiler.save_path", "traces are in profiles/ of the run"),
    depends(
        "{global_profiler*,profiler*,trainer.controller_nsight_options*,"
        "trainer.worker_nsight_options*,trainer.npu_profile*}",
        "profilers are off",
    ),
    no_effect("transfer_queue*", "data moves through Ray, with the same numbers"),
    needs(
        "{skip.rollout,skip.async_rollout,skip.rollout_tq}.enable", missing.SKIPPED_ROLLOUTS, _OFF
    ),
    depends("skip.*", "skipping rollouts is off"),
    needs(
        "{trainer.ref_update_freq,trainer.log_freq,algorithm.dpo_beta,algorithm.sppo_eta,"
        "actor_rollout_ref.actor.sppo_eta}",
        missing.SPIN,
    ),
    no_effect("algorithm.filter_groups.max_inflight_gen_batches", _SPEED),
)

RULES: tuple[Rule, ...] = (*ROLLOUT, *DATA, *REWARD, *TRAINER)
