"use strict";
// Charts in page order. A line is [candidate metrics (the first one present is drawn), label, dash];
// a chart with `pattern` has a line for each metric that matches, labelled without `strip`.
const PERCENT = ".3~p";
const SECTIONS = [
  ["Learning", [
    { title: "Reward", unit: "mean score of the training responses", lines: [[["critic/score/mean"]]] },
    { title: "Validation", unit: "mean per data set", pattern: /^val-core\/.+\/mean@\d+$|^val\/loss$/, strip: "val-core/", points: true, alarms: ["validation_falls"] },
    { title: "Training loss", unit: "nats a token, or of a pair", lines: [[["train/loss"]]] },
    { title: "KL to the reference", unit: "nats a token", lines: [[["actor/reward_kl_penalty", "actor/kl_loss"]]], alarms: ["kl"] },
    { title: "Entropy", unit: "nats a token", lines: [[["actor/entropy"]]], zero: true, alarms: ["entropy_collapse"] },
    { title: "Response length", unit: "tokens", lines: [[["response_length/mean"], "mean", "solid"], [["response_length/max"], "longest", "dot"]],
      zero: true, alarms: ["length_drift"] },
    { title: "Truncated responses", unit: "share that reaches the maximum length", lines: [[["response_length/clip_ratio"]]], format: PERCENT,
      zero: true, alarms: ["truncation"] },
    { title: "Groups without variance", unit: "share of groups in which all responses score the same", lines: [[["critic/score/uniform_groups"]]],
      format: PERCENT, zero: true, alarms: ["uniform_groups"] },
  ]],
  ["Optimisation", [
    { title: "Gradient norms", unit: "before clipping", lines: [[["actor/grad_norm"], "actor", "solid"], [["critic/grad_norm"], "critic", "dot"]],
      log: true, alarms: ["skipped_updates"] },
    { title: "Clip fractions", unit: "share of tokens",
      lines: [[["actor/pg_clipfrac"], "policy", "solid"], [["critic/vf_clipfrac"], "value", "dot"]], format: PERCENT, zero: true },
    { title: "KL of an update", unit: "nats per token, policy before and after", lines: [[["actor/ppo_kl"]]], alarms: ["update_kl"] },
    { title: "Explained variance", unit: "of the returns, by the critic; 1 is perfect", lines: [[["critic/vf_explained_var"]]], floor: -1 },
    { title: "Losses", unit: "of the last updates",
      lines: [[["actor/pg_loss"], "policy", "solid"], [["critic/vf_loss"], "value", "dot"]] },
    { title: "Learning rates", unit: "", lines: [[["actor/lr"], "actor", "solid"], [["critic/lr"], "critic", "dot"]], zero: true },
    { title: "Engine versus trainer", unit: "difference of a token's probability",
      lines: [[["training/rollout_probs_diff_mean"], "mean", "solid"], [["training/rollout_probs_diff_max"], "largest", "dot"]], log: true,
      alarms: ["rollout_mismatch"] },
  ]],
  ["Agents", [
    { title: "Turns", unit: "of an episode", lines: [[["agent/turns/mean"], "mean", "solid"], [["agent/turns/max"], "most", "dot"]], zero: true },
    { title: "Outcomes", unit: "share of episodes", pattern: /^agent\/outcome\//, strip: "agent/outcome/", format: PERCENT, zero: true },
    { title: "Tool tokens", unit: "share of the response that the policy did not write", lines: [[["agent/tool_tokens_share"]]], format: PERCENT, zero: true },
    { title: "Tool calls", unit: "per step", pattern: /^tool\/.+\/calls$|^agent\/refused_calls\//, strip: "tool/", zero: true },
    { title: "Tool errors", unit: "calls per step", pattern: /^tool\/.+\/errors$/, strip: "tool/", zero: true },
    { title: "Tool time", unit: "seconds of a call, mean", pattern: /^tool\/.+\/seconds$/, strip: "tool/", zero: true },
  ]],
  ["Speed and memory", [
    { title: "Throughput", unit: "tokens per second per device", lines: [[["perf/throughput"]]], zero: true },
    { title: "Time of a step", unit: "seconds", lines: [[["timing_s/step"]]], zero: true },
    { title: "Memory", unit: "GB in use", zero: true,
      lines: [[["perf/max_memory_allocated_gb"], "GPU", "solid"], [["perf/cpu_memory_used_gb"], "host", "dot"]] },
    { title: "Utilisation", unit: "share of the device's peak FLOPs",
      lines: [[["perf/mfu/actor"], "actor", "solid"], [["perf/mfu/critic"], "critic", "dot"]], format: PERCENT, zero: true },
  ]],
];
// Phases of a step in order: timing name, label, colour.
const PHASES = [
  ["wait_rollouts", "waiting for rollouts", "#b3c7de"], ["gen", "rollout", "#3b7dd8"], ["reward", "reward", "#e3a93c"], ["rm_scores", "reward model", "#c98a2b"],
  ["update_rm", "reward model update", "#b5652a"], ["old_log_prob", "log-probs", "#7fb2e5"], ["ref", "reference", "#9a7fd1"],
  ["values", "values", "#c79ad6"], ["adv", "controller", "#8d939e"], ["update_critic", "critic update", "#d1735b"],
  ["update_actor", "actor update", "#2a9d6f"], ["update_weights", "weights", "#7ccfae"], ["testing", "validation", "#b9bdc6"],
  ["save_checkpoint", "checkpoint", "#6b6f78"],
];
// Phases that the engines of an asynchronous run spend beside a step.
const BESIDE_A_STEP = ["gen", "reward"];
const RUN_COLOURS = ["#3b7dd8", "#e0702f", "#2a9d6f", "#a05fc4", "#d1495b", "#12a3b4", "#a9822b", "#7a7f8a"];
