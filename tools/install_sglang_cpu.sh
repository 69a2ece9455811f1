#!/usr/bin/env bash
# Makes a virtual environment with SGLang 0.5.17 for machines without a GPU, for tests and
# small runs: `tools/install_sglang_cpu.sh .venv-sglang`. About a minute; 2.5 GB.
#
# SGLang's wheel asks for CUDA packages that a CPU cannot load, so it goes in without its
# dependencies; `sglang_cpu/requirements.txt` lists what it imports when it serves text, and
# `sglang_cpu/` is a small package of three stand-ins (its modules say what each is for).
# Point `rollout.sglang_python` at VENV/bin/python. Further arguments go to each pip call.
set -euo pipefail

here=$(dirname "$(readlink -f "$0")")/sglang_cpu
venv=${1:?usage: install_sglang_cpu.sh VENV [pip arguments]}
shift
python=${PYTHON:-python3.11}
stamp=$venv/.installed-$(cat "$here"/requirements.txt "$here"/*.py "$here"/*/*.py "$0" | sha256sum | cut -c1-16)

if [ -e "$stamp" ]; then
    exit 0
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/pip" install -q "$@" -r "$here/requirements.txt"
# torch's CUDA build brings its own triton; beside the CPU build SGLang needs one to import.
"$venv/bin/python" -c 'import triton' 2>/dev/null || "$venv/bin/pip" install -q "$@" triton==3.6.0
"$venv/bin/pip" install -q "$@" --no-deps sglang==0.5.17 torchvision==0.28.0 xgrammar==0.2.1
"$venv/bin/pip" install -q "$@" --no-deps --force-reinstall "$here"
"$venv/bin/python" -c 'import torchvision, sgl_kernel, sglang'
touch "$stamp"
