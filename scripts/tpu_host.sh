#!/usr/bin/env bash
# Runs on every host of a TPU slice, from the unpacked code: the environment, and a job in the
# background that outlives the connection. scripts/cloud_tpu.sh calls it.
#
#   tpu_host.sh setup                  the environment in ~/m4-env, from requirements-tpu.lock
#   tpu_host.sh start JOB ARGUMENTS    starts `m4 ARGUMENTS`; files in ~/m4-jobs/JOB
#   tpu_host.sh status JOB             prints: m4-job HOST none|running|finished|failed N|lost
#   tpu_host.sh status JOB ARGUMENTS   the same of the job that was started with these; "other"
#                                      where one of that name was started with others, "refused"
#                                      where m4 refused that one
#   tpu_host.sh stop JOB [SECONDS]     SIGTERM, so that m4 saves its step; after a while SIGKILL
#   tpu_host.sh follow JOB             the log, as it grows
set -euo pipefail
shopt -s inherit_errexit

code=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/common.sh
source "$code/scripts/common.sh"
environment=${M4_ENVIRONMENT:-$HOME/m4-env}
jobs=${M4_JOBS:-$HOME/m4-jobs}

setup() {
  rm -f "$environment/.ready"
  python3 -m pip install --quiet --user uv
  local uv=$HOME/.local/bin/uv
  # The image's own Python is older than m4 needs, so uv may fetch one.
  "$uv" venv --quiet --allow-existing --python 3.12 "$environment"
  "$uv" pip sync --quiet --python "$environment" --require-hashes "$code/requirements-tpu.lock"
  "$uv" pip install --quiet --python "$environment" --no-deps --no-build-isolation \
    --editable "$code"
  "$environment/bin/m4" --help >/dev/null
  touch "$environment/.ready"
}

# "none", "running", "finished", "failed N" or "lost": it ended without a word (the machine started
# again, or it was killed).
state() {
  local folder=$jobs/$1 status
  if [[ -f $folder/status ]]; then
    status=$(<"$folder/status")
    if ((status == 0)); then echo finished; else echo "failed $status"; fi
  elif [[ ! -f $folder/pid ]]; then
    echo none
  elif kill -0 "$(<"$folder/pid")" 2>/dev/null; then
    echo running
  else
    echo lost
  fi
}

# The state of a job that was started with these arguments; "other" is one that was not, "refused"
# one that m4 refused: it is not running.
state_of() {
  local said kept="" file=$jobs/$1/arguments
  said=$(state "$1")
  if [[ -f $file ]]; then kept=$(<"$file"); fi
  if (($# > 1)) && [[ $said != none && $kept != "$(quoted "${@:2}")" ]]; then
    if [[ $said == "failed 2" ]]; then said=refused; else said=other; fi
  fi
  echo "$said"
}

start() {
  local job=$1 folder=$jobs/$1
  shift
  [[ $(state "$job") != running ]] || mistake "$job is running already; stop it first"
  mkdir -p "$folder"
  rm -f "$folder/status" "$folder/pid"
  quoted "$@" >"$folder/arguments"
  cd "$code"
  # Listed platforms must be there: a host whose TPU cannot be used is an error, not a slow CPU.
  export JAX_PLATFORMS=${JAX_PLATFORMS:-tpu,cpu}
  setsid nohup bash "$code/scripts/tpu_host.sh" work "$job" "$@" >>"$folder/log" 2>&1 </dev/null &
  # The next `status` must find it.
  until [[ -f $folder/pid || -f $folder/status ]]; do sleep 0.1; done
}

# The job itself, in the background: its process, and in the end its exit status.
work() {
  local folder=$jobs/$1 status=0
  shift
  "$environment/bin/m4" "$@" &
  echo $! >"$folder/pid"
  wait $! || status=$?
  echo "$status" >"$folder/.status"
  mv "$folder/.status" "$folder/status"
}

stop() {
  local folder=$jobs/$1 left=${2:-300}
  [[ $(state "$1") == running ]] || return 0
  kill -TERM "$(<"$folder/pid")"
  while [[ $(state "$1") == running ]]; do
    if ((left-- <= 0)); then
      kill -KILL "$(<"$folder/pid")" 2>/dev/null || true
      break
    fi
    sleep 1
  done
}

command=${1:-}
if [[ $command == setup ]]; then
  setup
  exit
fi
[[ $command =~ ^(start|work|status|stop|follow)$ ]] ||
  mistake "command '$command': must be setup, start, status, stop or follow"
job=${2:-}
check_name job "$job"
shift 2
case $command in
  start) start "$job" "$@" ;;
  work) work "$job" "$@" ;;
  status) echo "m4-job $(hostname) $(state_of "$job" "$@")" ;;
  stop) stop "$job" "$@" ;;
  follow) exec tail -n 200 -F "$jobs/$job/log" ;;
esac
