#!/bin/bash
# The script of every job that slurm-rl submits. The words in double braces are filled in:
# the options of the stage, the `setup` lines, and the command. Anything else may be changed:
# copy this file and name the copy as `sbatch_template`. `slurm-rl plan` prints the result.
#SBATCH --job-name=demo.i0013.score.ab12cd37
#SBATCH --output=/scratch/runs/demo/iterations/000013/logs/score.0002.%j.log
#SBATCH --open-mode=append
#SBATCH --chdir=/scratch/runs/demo
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --begin=now+30
#SBATCH --account=abc@a100
#SBATCH --time=04:00:00
#SBATCH --comment="preemption=yes;requeue=true"
#SBATCH --hint=nomultithread
#SBATCH --site-plugin="say \"\\hi\""
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --partition=cpu

module purge
module load apptainer

# Else a job that was submitted with --export=NONE starts its steps without a PATH.
unset SLURM_EXPORT_ENV

# exec: the supervisor becomes the batch process, the only one that --signal=B:… reaches.
exec '/opt/slurm rl/bin/python' -m slurm_rl.launch.job link /scratch/runs/demo iterations/000013/score.t0/submit.0002 demo.x
