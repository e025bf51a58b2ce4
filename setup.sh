#!/usr/bin/env bash
# Installs the requirements and puts the environment's `python` first on PATH. benchmark.sh and test.sh
# source this file; you can also run it.
#
# The environment is .venv next to this file. It is created once, and updated when the requirements
# change. Set VENV to use an existing environment (conda, a container) without changing it.

find_python() {
  local name
  for name in python3.14 python3.13 python3.12 python3.11 python3 python; do
    # Run the command, because pyenv puts commands on PATH that only print an error.
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  echo "setup: no Python 3.11 or later on PATH. Install one, then run this again." >&2
  return 1
}

pip_install() {
  "$VENV/bin/python" -m pip --disable-pip-version-check install -qq --no-input --no-compile "$@"
}

report_progress() { # print progress until killed, or until this shell ends
  local seconds=0
  # Wait with read -t, because a sleep process would outlive this shell.
  while read -rt 20 <> <(:) || kill -0 $$ 2>/dev/null; do
    seconds=$((seconds + 20))
    echo "setup: still installing after $seconds s, $(du -sh "$VENV" | cut -f 1) so far"
  done
}

size_of() { # FILE: print the disk space that the packages of a requirements file need
  case $1 in
  requirements.txt) echo "2.5 GB" ;;
  requirements-cuda.txt) echo "2.5 GB and the CUDA libraries" ;;
  requirements-tune.txt) echo "0.4 GB more" ;;
  requirements-test.txt) echo "0.3 GB more" ;;
  esac
}

python_headers() {
  "$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))'
}

install_environment() { # create or update $VENV from the file $1
  local requirements=$1 python torch
  python=$(find_python) || return
  # Environments created by uv have no pip.
  if ! "$VENV/bin/python" -m pip --version &>/dev/null && ! "$VENV/bin/python" -m ensurepip &>/dev/null; then
    echo "setup: creating $VENV with $("$python" --version)"
    find "$VENV" -mindepth 1 ! -name setup.lock -delete
    if ! "$python" -m venv "$VENV"; then
      echo "setup: $python cannot create an environment. On Debian or Ubuntu: apt install python3-venv" >&2
      return 1
    fi
  fi
  echo "setup: installing $requirements into $VENV: $(size_of "$requirements"), a few minutes"
  torch=$(grep '^torch==' requirements.txt)
  # On Linux with x86-64, torch from PyPI includes gigabytes of CUDA libraries, which only a GPU needs.
  # The dependencies of torch are installed from PyPI below, in the locked versions.
  if [[ $requirements == requirements.txt && $(uname -sm) == "Linux x86_64" ]]; then
    pip_install --no-deps --retries 0 --timeout 15 --index-url https://download.pytorch.org/whl/cpu "$torch" \
      2>/dev/null || echo "setup: cannot download the CPU build of PyTorch, so torch is installed from PyPI"
  fi
  if ! pip_install --constraint requirements-lock.txt --requirement "$requirements"; then
    echo "setup: pip failed; see above. Check the network and the free disk space," \
      "then run the same command again to continue." >&2
    return 1
  fi
  if ! echo '#include <Python.h>' | "${CXX:-g++}" -fsyntax-only -x c++ -I "$(python_headers)" - 2>/dev/null; then
    echo "setup: torch.compile needs a C++ compiler and the Python headers, so scripts that use it will" \
      "fail. On Debian or Ubuntu: apt install g++ python3-dev" >&2
  fi
}

ensure() { # install the requirements file $1, unless the stamp $2 says that it is installed
  local requirements=$1 stamp=$VENV/$2 wanted
  wanted="$requirements $(cat requirements.txt requirements-lock.txt "$requirements" | cksum)"
  # The stamp is written last, so an interrupted installation is repeated.
  if [[ $(cat "$stamp" 2>/dev/null) != "$wanted" ]] || ! "$VENV/bin/python" -c '' 2>/dev/null; then
    if ! { mkdir -p "$VENV" && : >>"$VENV/setup.lock"; } 2>/dev/null; then
      echo "setup: cannot write to $PWD/$VENV. Set VENV to use another environment." >&2
      return 2
    fi
    (
      if ! flock --nonblock 9; then
        echo "setup: waiting for another setup of $PWD/$VENV"
        flock 9
      fi
      [[ $(cat "$stamp" 2>/dev/null) == "$wanted" ]] && "$VENV/bin/python" -c '' 2>/dev/null && exit
      report_progress 9>&- &
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
      echo "setup: VENV is '$VENV', but there is no $VENV/bin/python." >&2
      return 2
    fi
  else
    VENV=.venv
    if nvidia-smi -L &>/dev/null; then requirements="requirements-cuda.txt"; fi
    ensure "$requirements" installed || return
    # test.sh sets SETUP_WITH to install additional packages, which a benchmark does not need.
    for name in ${SETUP_WITH:-}; do
      ensure "requirements-$name.txt" "installed-$name" || return
    done
  fi
  bin=$(cd -- "$VENV/bin" && pwd)
  PATH=$bin:$PATH
  if [[ $(command -v python) != "$bin/python" ]]; then
    echo "setup: the path '$bin' contains a colon, so it cannot be on PATH. Move the project elsewhere." >&2
    return 2
  fi
}

unset CDPATH # with CDPATH, cd could change to another folder of the same name
here=$(readlink -f -- "${BASH_SOURCE[0]}")
here=${here%/*}/
if [[ ${VENV:-/} != /* && ! . -ef $here ]]; then VENV=$PWD/$VENV; fi
cd -- "$here" || exit 2
setup || exit 2
