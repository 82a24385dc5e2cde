#!/usr/bin/env bash
# Makes the virtual environment in which `make test` and `make demo` run: CPU packages where there is
# no NVIDIA GPU, SGLang's own (CUDA) packages where there is one. Does nothing when it is up to date.
#
#   SGLANG=0.5.23   SGLang version (another version gets an environment of its own)
#   PYTHON=python3  interpreter, 3.11 or later
#   VENV=.venv      where the environment goes
set -euo pipefail
cd "$(dirname "$0")/../.."

sglang=${SGLANG:-0.5.23}
python=${PYTHON:-python3}
default=.venv
[ "$sglang" = 0.5.23 ] || default=.venv-$sglang
venv=${VENV:-$default}
here=tests/environment
log=$venv/setup.log

fail() { echo "setup: $*" >&2; exit 1; }

command -v "$python" >/dev/null || fail "'$python' was not found; install Python 3.11 or later, or name it: PYTHON=/path/to/python3 make ..."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
  || fail "$("$python" --version) is too old; kvpolicy needs Python 3.11 or later: PYTHON=/path/to/python3.11 make ..."

device=cpu
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then device=cuda; fi

stamp=$({ echo "$device $sglang"; "$python" --version; cat pyproject.toml $here/setup.sh $here/requirements-*.txt; } | sha256sum)
if [ -f "$venv/.ready" ] && [ "$(cat "$venv/.ready")" = "$stamp" ]; then exit 0; fi

rm -rf "$venv"
"$python" -m venv "$venv" || fail "could not create $venv; on Debian install the package python3-venv"
: >"$log"
site=$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')
# Installs packages; what they hold is compiled at the end, on all cores.
pip() {
  echo "setup: $1"; shift
  "$venv/bin/python" -m pip --disable-pip-version-check install --no-compile "$@" >>"$log" 2>&1 \
    || { tail -n 15 "$log" >&2; fail "pip failed (whole log: $log); check the network and pip's index settings, then run it again"; }
}

if [ $device = cuda ]; then
  pip "SGLang $sglang with its CUDA packages (several GB, minutes)" "sglang==$sglang"
  pip "what the tests need" -r $here/requirements-dev.txt
else
  # SGLang's own requirements would bring the CUDA stack, so its CPU needs are listed and it comes alone.
  # torch first and alone: pip's settings (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL) decide which build it is.
  pip "torch" "$(grep '^torch==' $here/requirements-cpu.txt)"
  pip "what SGLang needs on a CPU (about 2 GB, 2 minutes)" -r $here/requirements-cpu.txt
  pip "SGLang $sglang" --no-deps torchvision==0.28.0 "sglang==$sglang"
  pip "the CPU platform for SGLang" --no-deps $here/platform
  cp $here/torchvision_cpu.py "$site/_kvpolicy_torchvision_cpu.py"
  echo "import _kvpolicy_torchvision_cpu" >"$site/_kvpolicy_torchvision_cpu.pth"
  # Beside the environment's own: GPU machines with an older torch have it (tests/test_compiled_kernels.py).
  pip "Triton 3.6.0, for which kernels are compiled too" --no-deps --target "$venv/triton-3.6.0" triton==3.6.0
fi
pip "kvpolicy" --no-deps --editable .
echo "setup: bytecode"
# Some packages bring templates and other versions' files, which do not compile.
"$venv/bin/python" -m compileall -q -j 0 "$site" >>"$log" 2>&1 || true
echo "$stamp" >"$venv/.ready"
echo "setup: $venv is ready (SGLang $sglang, $device)"
