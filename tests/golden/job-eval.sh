#!/bin/bash
# The script of every job that slurm-rl submits. The words in double braces are filled in:
# the options of the stage, the `setup` lines, and the command. Anything else may be changed:
# copy this file and name the copy as `sbatch_template`. `slurm-rl plan` prints the result.
#SBATCH --job-name=demo.i0012.eval-aime.ab12cd38
#SBATCH --output=/scratch/runs/demo/iterations/000012/logs/eval-aime.0001.%j.log
#SBATCH --open-mode=append
#SBATCH --chdir=/scratch/runs/demo
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --account=abc@a100
#SBATCH --nodes=1
#SBATCH --time=00:30:00
#SBATCH --comment="preemption=yes;requeue=true"
#SBATCH --hint=nomultithread
#SBATCH --exclusive
#SBATCH --site-plugin="say \"\\hi\""
#SBATCH --partition=preempt
#SBATCH --cpus-per-task=16
#SBATCH --gres=gpu:a100:4

module purge
module load apptainer

# Else a job that was submitted with --export=NONE starts its steps without a PATH.
unset SLURM_EXPORT_ENV

# exec: the supervisor becomes the batch process, the only one that --signal=B:… reaches.
exec '/opt/slurm rl/bin/python' -m slurm_rl.launch.job link /scratch/runs/demo iterations/000012/eval-aime.t0/submit.0001 demo.x
