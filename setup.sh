#!/usr/bin/env bash
# Sourced by benchmark.sh and test.sh, or run by itself: installs what they need, and puts its `python`
# first on PATH.
#
# The environment is .venv beside this file. It is made once, and again when the requirements change.
# With VENV set to an environment of your own (conda, a container), that one is used as it is.

find_python() {
  local name
  for name in python3.14 python3.13 python3.12 python3.11 python3 python; do
    # It must run, and not only be there: pyenv puts names on PATH that answer with an error.
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  echo "setup: no Python 3.11 or later on PATH: install one, then run this again." >&2
  return 1
}

pip_install() {
  "$VENV/bin/python" -m pip --disable-pip-version-check install -qq --no-input "$@"
}

say_it_is_alive() { # until it is killed, or this shell is
  local seconds=0
  # Not sleep, which would be left behind.
  while read -rt 20 <> <(:) || kill -0 $$ 2>/dev/null; do
    seconds=$((seconds + 20))
    echo "setup: still installing after $seconds s, $(du -sh "$VENV" | cut -f 1) so far"
  done
}

size_of() { # FILE: of what it installs, on the disk
  case $1 in
  requirements.txt) echo "2.5 GB" ;;
  requirements-cuda.txt) echo "2.5 GB and CUDA's libraries" ;;
  requirements-tune.txt) echo "0.4 GB on top" ;;
  requirements-test.txt) echo "0.2 GB on top" ;;
  esac
}

python_headers() {
  "$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))'
}

install_environment() { # make or update $VENV from the file $1; what is already there stays
  local requirements=$1 python torch
  python=$(find_python) || return
  # uv's environments have no pip.
  if ! "$VENV/bin/python" -m pip --version &>/dev/null && ! "$VENV/bin/python" -m ensurepip &>/dev/null; then
    echo "setup: making $VENV with $("$python" --version)"
    find "$VENV" -mindepth 1 ! -name setup.lock -delete
    if ! "$python" -m venv "$VENV"; then
      echo "setup: $python cannot make an environment; on Debian or Ubuntu: apt install python3-venv" >&2
      return 1
    fi
  fi
  echo "setup: installing $requirements into $VENV: $(size_of "$requirements"), some minutes"
  torch=$(grep '^torch==' requirements.txt)
  # PyPI's torch for Linux on x86-64 brings gigabytes of CUDA, which only a GPU needs. What torch
  # depends on comes from PyPI below, since the versions of the lock are there.
  if [[ $requirements == requirements.txt && $(uname -sm) == "Linux x86_64" ]]; then
    pip_install --no-deps --retries 0 --timeout 15 --index-url https://download.pytorch.org/whl/cpu "$torch" \
      2>/dev/null || echo "setup: PyTorch's CPU index does not answer, so torch comes from PyPI"
  fi
  if ! pip_install --constraint requirements-lock.txt --requirement "$requirements"; then
    echo "setup: pip failed, as it says above. Is there a network, and room on the disk?" \
      "The same command goes on from here." >&2
    return 1
  fi
  if ! echo '#include <Python.h>' | "${CXX:-g++}" -fsyntax-only -x c++ -I "$(python_headers)" - 2>/dev/null; then
    echo "setup: ppo_torch_compile.py will not run: torch.compile needs a C++ compiler and Python's" \
      "headers; on Debian or Ubuntu: apt install g++ python3-dev" >&2
  fi
}

ensure() { # install the requirements file $1, unless the stamp $2 says that it is there
  local requirements=$1 stamp=$VENV/$2 wanted
  wanted="$requirements $(cat requirements.txt requirements-lock.txt "$requirements" | cksum)"
  # The stamp is written last, so an interrupted installation is repeated.
  if [[ $(cat "$stamp" 2>/dev/null) != "$wanted" ]] || ! "$VENV/bin/python" -c '' 2>/dev/null; then
    if ! { mkdir -p "$VENV" && : >>"$VENV/setup.lock"; } 2>/dev/null; then
      echo "setup: $PWD/$VENV must be a folder to write to, or VENV an environment of your own." >&2
      return 2
    fi
    (
      if ! flock --nonblock 9; then # of two setups, the second waits and then finds the work done
        echo "setup: waiting for another setup of $PWD/$VENV"
        flock 9
      fi
      [[ $(cat "$stamp" 2>/dev/null) == "$wanted" ]] && "$VENV/bin/python" -c '' 2>/dev/null && exit
      say_it_is_alive 9>&- &
      alive=$!
      trap 'kill "$alive"' EXIT
      install_environment "$requirements" && echo "$wanted" >"$stamp" && echo "setup: done"
    ) 9>"$VENV/setup.lock" || return 2
  fi
}

setup() {
  local requirements=requirements.txt name bin
  if [[ -n ${VENV:-} ]]; then
    if [[ ! -x $VENV/bin/python ]]; then
      echo "setup: VENV is '$VENV', which has no bin/python." >&2
      return 2
    fi
  else
    VENV=.venv
    if nvidia-smi -L &>/dev/null; then requirements="requirements-cuda.txt"; fi
    ensure "$requirements" installed || return
    # What only test.sh asks for, so that a benchmark need not wait for it.
    for name in ${SETUP_WITH:-}; do
      ensure "requirements-$name.txt" "installed-$name" || return
    done
  fi
  bin=$(cd -- "$VENV/bin" && pwd)
  PATH=$bin:$PATH
  if [[ $(command -v python) != "$bin/python" ]]; then
    echo "setup: '$bin' cannot be on PATH: move it to where no folder has a colon in its name." >&2
    return 2
  fi
}

unset CDPATH # with it, cd may go to another folder of the same name, and prints where it went
here=$(readlink -f -- "${BASH_SOURCE[0]}")
here=${here%/*}/
if [[ ${VENV:-/} != /* && ! . -ef $here ]]; then VENV=$PWD/$VENV; fi
cd -- "$here" || exit 2
setup || exit 2
