#!/bin/bash
# The script of every job that slurm-rl submits. The words in double braces are filled in:
# the options of the stage, the `setup` lines, and the command. Anything else may be changed:
# copy this file and name the copy as `sbatch_template`. `slurm-rl plan` prints the result.
{{options}}

{{setup}}

# Else a job that was submitted with --export=NONE starts its steps without a PATH.
unset SLURM_EXPORT_ENV

# exec: the supervisor becomes the batch process, the only one that --signal=B:… reaches.
exec {{command}}
