#!/bin/bash
# The script of every job that slurm-rl submits. The words in double braces are filled in:
# the options of the stage, the `setup` lines, and the command. Anything else may be changed:
# copy this file and name the copy as `sbatch_template`. `slurm-rl plan` prints the result.
#SBATCH --job-name=demo.i0012.train.ab12cd34
#SBATCH --output=/scratch/runs/demo/iterations/000012/logs/train.0003.%j.log
#SBATCH --open-mode=append
#SBATCH --chdir=/scratch/runs/demo
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --dependency=afterany:4711
#SBATCH --account=abc@a100
#SBATCH --nodes=2
#SBATCH --time=04:00:00
#SBATCH --comment="preemption=yes;requeue=true"
#SBATCH --hint=nomultithread
#SBATCH --exclusive
#SBATCH --site-plugin="say \"\\hi\""
#SBATCH --partition=main
#SBATCH --exclude=bad1,n07,n09
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:a100:4

module purge
module load apptainer

# Else a job that was submitted with --export=NONE starts its steps without a PATH.
unset SLURM_EXPORT_ENV

# exec: the supervisor becomes the batch process, the only one that --signal=B:… reaches.
exec '/opt/slurm rl/bin/python' -m slurm_rl.launch.job link /scratch/runs/demo iterations/000012/train.t0/submit.0003 demo.x
