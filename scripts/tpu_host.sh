#!/usr/bin/env bash
# Runs on every host of a TPU slice, from the unpacked code: sets up the environment, and runs a job
# in the background that outlives the connection (scripts/cloud_tpu.sh calls it), or in the foreground
# of a pod (scripts/gke.sh). WORDS are NAME=VALUE for m4's environment, then m4's arguments.
#
#   tpu_host.sh setup               makes the environment in ~/m4-env, from requirements-tpu.lock
#   tpu_host.sh start JOB WORDS     starts m4; its files are in ~/m4-jobs/JOB
#   tpu_host.sh status JOB          prints: m4-job HOST none|running N|finished|failed N|lost; a
#                                   running one has written nothing to its run folder for N seconds
#   tpu_host.sh stop JOB [SECONDS]  sends SIGTERM, so that m4 saves its step; after a while SIGABRT,
#                                   at which Python writes the stacks of all threads to the log
#   tpu_host.sh follow JOB          prints the log, as it grows
#   tpu_host.sh run WORDS           runs m4 in the foreground; ends with its exit status
#   tpu_host.sh alive MINUTES       ends with status 1 where `run` has made no progress for so long
set -euo pipefail

code=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/common.sh
source "$code/scripts/common.sh"
environment=${M4_ENVIRONMENT:-$HOME/m4-env}
jobs=${M4_JOBS:-$HOME/m4-jobs}

setup() {
  python3 -m pip install --quiet --user uv
  local uv=$HOME/.local/bin/uv
  # The image's own Python is older than m4 needs, so uv may fetch one.
  "$uv" venv --quiet --allow-existing --python 3.12 "$environment"
  "$uv" pip sync --quiet --python "$environment" --require-hashes "$code/requirements-tpu.lock"
  "$uv" pip install --quiet --python "$environment" --no-deps --no-build-isolation \
    --editable "$code"
  "$environment/bin/m4" --help >/dev/null
}

# Prints the state: none, running, finished, failed N, or lost (ended without an exit status: the
# machine started again, or the job was killed).
state() {
  local folder=$jobs/$1 status pid
  # A start removes both files, so they are read without a test first.
  if status=$(cat "$folder/status" 2>/dev/null); then
    if ((status == 0)); then echo finished; else echo "failed $status"; fi
  elif ! pid=$(cat "$folder/pid" 2>/dev/null); then
    echo none
  elif kill -0 "$pid" 2>/dev/null; then
    echo running
  else
    echo lost
  fi
}

# Prints the seconds since the job was started, or since its run folder or its local copy last
# changed. Jobs write metrics, translations and arrays of the corpus there, process 0 for all hosts.
quiet_seconds() {
  local folder=$jobs/$1 newest
  newest=$(find "$folder/pid" "$(<"$folder/cache")" "$(<"$folder/model_dir")" \
    -type f -printf '%Ts\n' 2>/dev/null | sort -n | tail -n 1) || true # one of them may be missing
  echo $(($(date +%s) - ${newest:-0}))
}

status() {
  local said
  said=$(state "$1")
  if [[ $said == running ]]; then said+=" $(quiet_seconds "$1")"; fi
  echo "m4-job $(hostname) $said"
}

# MODEL_DIR, where the words name it.
model_dir() {
  local word before=""
  for word in "$@"; do
    if [[ $before == --model_dir ]]; then word=--model_dir=$word; fi
    if [[ $word == --model_dir=* ]]; then echo "${word#*=}"; fi
    before=$word
  done | tail -n 1
}

# Empties the job's folder, but keeps an earlier start's log under another name.
prepare() {
  local folder=$jobs/$1
  shift
  mkdir -p "$folder"
  rm -f "$folder/status" "$folder/pid"
  if [[ -f $folder/log ]]; then
    mv "$folder/log" "$folder/log.$(date -u -r "$folder/log" +%Y%m%dT%H%M%SZ)"
  fi
  model_dir "$@" >"$folder/model_dir"
}

# Starts m4, and a process that copies its log to a MODEL_DIR in a bucket. Sets pid and uploader.
launch() {
  local folder=$jobs/$1 job=$1 address
  shift
  address=$(<"$folder/model_dir")
  while [[ ${1:-} =~ ^[A-Za-z_][A-Za-z0-9_]*= ]]; do
    export "${1?}"
    shift
  done
  echo "${XDG_CACHE_HOME:-$HOME/.cache}/m4" >"$folder/cache"
  cd "$code"
  # JAX fails where a listed platform is missing, rather than computing on a slow CPU.
  export JAX_PLATFORMS=${JAX_PLATFORMS:-tpu,cpu}
  # Stacks of all threads at a crash in C, and at `stop`'s last signal.
  export PYTHONFAULTHANDLER=1
  ulimit -c 0 # a host's memory is too large for a core file
  "$environment/bin/m4" "$@" &
  pid=$! uploader=""
  echo "$pid" >"$folder/.pid"
  mv "$folder/.pid" "$folder/pid" # `status` must not read half of it
  if [[ $address == *://* ]]; then
    "$environment/bin/python" "$code/scripts/copy_log.py" "$folder/log" \
      "${address%/}/logs/$(hostname)/$job.$(date -u +%Y%m%dT%H%M%SZ).log" "$pid" &
    uploader=$!
  fi
}

start() {
  local job=$1 folder=$jobs/$1
  [[ $(state "$job") != running ]] || mistake "$job is running already; stop it first"
  prepare "$@"
  setsid nohup bash "$code/scripts/tpu_host.sh" work "$@" >>"$folder/log" 2>&1 </dev/null &
  # The next `status` finds it.
  until [[ -f $folder/pid || -f $folder/status ]]; do sleep 0.1; done
}

# Runs the job in the background, and keeps its exit status.
work() {
  local folder=$jobs/$1 status=0
  launch "$@"
  wait "$pid" || status=$?
  echo "$status" >"$folder/.status"
  mv "$folder/.status" "$folder/status"
}

run_here() {
  local log=$jobs/pod/log status reader
  prepare pod "$@"
  launch pod "$@" >>"$log" 2>&1
  trap 'kill -TERM "$pid" 2>/dev/null || true' TERM INT
  tail -n +1 --follow --pid="$pid" "$log" &
  reader=$!
  while true; do
    status=0
    wait "$pid" || status=$?
    # A signal ends `wait`, not m4.
    if ! { ((status > 128)) && kill -0 "$pid" 2>/dev/null; }; then break; fi
  done
  wait "$reader" ${uploader:+"$uploader"} || true
  exit "$status"
}

alive() {
  # Only process 0 writes; ending its pod ends all of them.
  if [[ ${TPU_WORKER_ID:-0} != 0 || ${MEGASCALE_SLICE_ID:-0} != 0 ]]; then return; fi
  [[ $(state pod) == running ]] || return 0
  (($(quiet_seconds pod) < $1 * 60)) || mistake "no progress for $1 minutes"
}

stop() {
  local folder=$jobs/$1 left=${2:-300} pid
  [[ $(state "$1") == running ]] || return 0
  pid=$(<"$folder/pid")
  kill -TERM "$pid"
  while [[ $(state "$1") == running ]]; do
    if ((left == 0)); then kill -ABRT "$pid" 2>/dev/null || true; fi
    if ((left <= -10)); then
      kill -KILL "$pid" 2>/dev/null || true
      break
    fi
    left=$((left - 1))
    sleep 1
  done
}

command=${1:-}
[[ $command =~ ^(setup|start|work|status|stop|follow|run|alive)$ ]] ||
  mistake "command '$command': must be setup, start, status, stop, follow, run or alive"
shift
case $command in
  start | work | status | stop | follow) check_name job "${1:-}" ;;
  alive) whole_numbers minutes "${1:-}" ;;
esac
case $command in
  setup) setup ;;
  start) start "$@" ;;
  work) work "$@" ;;
  status) status "$1" ;;
  stop) stop "$@" ;;
  follow) exec tail -n 200 -F "$jobs/$1/log" ;;
  run) run_here "$@" ;;
  alive) alive "$@" ;;
esac
