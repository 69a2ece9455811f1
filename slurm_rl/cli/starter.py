"""init: a configuration to start from, with a comment at every choice."""

from __future__ import annotations

from pathlib import Path

from slurm_rl.cli.terminal import say
from slurm_rl.errors import ConfigError

_TEXT = """\
# A slurm-rl run. Check it with `slurm-rl validate {path}`, look at its jobs with
# `slurm-rl plan {path}`, start it with `slurm-rl submit {path}`.

run:
  name: my-run                  # first part of every job's name
  dir: runs                     # on the shared file system; holds my-run/

hf_checkpoint: /path/to/model   # a Hugging Face model directory: Llama, Qwen2 or Qwen3
num_rollout: 100                # iterations; each is a rollout job and a train job
seed: 1234
launcher: slurm                 # local: the same stages as processes of this machine
# deterministic: true           # the same bytes, however often the run is killed
# code: [./myrl]                # folders of your own Python, snapshotted when the run is made

# What every job of this run shares, under sbatch's own names. A stage may say otherwise.
slurm:
  # account: my-account
  # partition: gpu
  nodes: 1
  gpus_per_node: 1
  cpus_per_task: 8
  time: "02:00:00"
# submit_from: login            # where compute nodes may not call sbatch (then: slurm-rl watch)

# Jobs that keep the chain moving: one core, no GPU.
# tick: {{slurm: {{partition: cpu}}}}

chain:
  pack: stage                   # iteration: one job runs rollout and train in turn
  window: 3                     # jobs kept in the queue ahead

rollout:
  engine: sglang
  prompt_data: /path/to/prompts.jsonl   # one JSON object a line
  input_key: prompt
  label_key: label
  apply_chat_template: true
  rollout_batch_size: 32        # prompts an iteration
  n_samples_per_prompt: 8
  rollout_max_response_len: 1024
  rollout_temperature: 1.0
  rm_type: exact_match          # or custom_rm_path: myrl.reward.score
  sglang: {{mem_fraction_static: 0.8}}    # SGLang's own server arguments

train:
  advantage_estimator: grpo
  eps_clip: 0.2
  global_batch_size: 256        # samples in one optimizer step
  micro_batch_size: 4
  megatron:                     # Megatron-core's own names
    lr: 1e-6
    lr_decay_style: constant
    weight_decay: 0.1
    clip_grad: 1.0
    bf16: true
"""


def write_starter(path: Path) -> None:
    """Write the file. Raises ConfigError rather than replacing one."""
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(_TEXT.format(path=path))
    except FileExistsError:
        raise ConfigError(f"{path}: exists already", hint="name another file") from None
    say(f"wrote {path}; next: slurm-rl validate {path}")
