# What the scripts share: one line for a mistake, commands that are shown or run, TPU slices.
# To be sourced by bash 4.4 or later.
# shellcheck shell=bash

DRY_RUN=false

# A mistake of the user's: one line, exit status 2.
mistake() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 2
}

# What the script says of itself, not the command's output.
say() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }

# The words as they would be typed: quoted where the shell would read them as something else.
quoted() {
  local word line=""
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_./:=@%+,-]+$ ]] || word=${word@Q}
    line+="${line:+ }$word"
  done
  printf '%s\n' "$line"
}

# Runs a command, or with --dry_run prints it.
run() {
  if $DRY_RUN; then quoted "$@"; else "$@"; fi
}

# With --dry_run: says when the commands that follow are run.
when() {
  if $DRY_RUN; then printf '# %s\n' "$*"; fi
}

# need name "$name" ...: every option has a value.
need() {
  while (($#)); do
    [[ -n $2 ]] || mistake "--$1=... is missing"
    shift 2
  done
}

whole_number() {
  [[ $2 =~ ^[0-9]+$ ]] || mistake "--$1=$2: must be a whole number"
}

# Names of machines, jobs and labels: Google Cloud and Kubernetes both take these.
check_name() {
  [[ $2 =~ ^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$ ]] ||
    mistake "--$1=$2: 1 to 40 of a-z, 0-9 and -, a letter first, no - at the end"
}

# The job of m4 and its arguments, behind --. Others than these use one machine.
check_job() {
  case ${1:-} in
    train | decode | eval) ;;
    "") mistake "no job: put it behind --, e.g. -- train --gin_file=gin_configs/v4_128.gin" ;;
    *) mistake "job '$1': must be train, decode or eval" ;;
  esac
}

# Sets what a slice is: SLICE_TYPE (Cloud TPU's accelerator type), SLICE_RUNTIME (the VM's image),
# SLICE_TOPOLOGY (chips), SLICE_HOSTS, SLICE_GKE (GKE's name) and SLICE_MACHINE. Four chips a host.
# v4's number counts TensorCores, two a chip; v5e's counts chips.
# shellcheck disable=SC2034  # the scripts that source this use them
describe_slice() {
  case $1 in
    v4-16) SLICE_TOPOLOGY=2x2x2 SLICE_HOSTS=2 ;;
    v4-32) SLICE_TOPOLOGY=2x2x4 SLICE_HOSTS=4 ;;
    v4-64) SLICE_TOPOLOGY=2x4x4 SLICE_HOSTS=8 ;;
    v4-128) SLICE_TOPOLOGY=4x4x4 SLICE_HOSTS=16 ;;
    v4-256) SLICE_TOPOLOGY=4x4x8 SLICE_HOSTS=32 ;;
    v4-512) SLICE_TOPOLOGY=4x8x8 SLICE_HOSTS=64 ;;
    v4-1024) SLICE_TOPOLOGY=8x8x8 SLICE_HOSTS=128 ;;
    v4-2048) SLICE_TOPOLOGY=8x8x16 SLICE_HOSTS=256 ;;
    v5e-16) SLICE_TOPOLOGY=4x4 SLICE_HOSTS=4 ;;
    v5e-32) SLICE_TOPOLOGY=4x8 SLICE_HOSTS=8 ;;
    v5e-64) SLICE_TOPOLOGY=8x8 SLICE_HOSTS=16 ;;
    v5e-128) SLICE_TOPOLOGY=8x16 SLICE_HOSTS=32 ;;
    v5e-256) SLICE_TOPOLOGY=16x16 SLICE_HOSTS=64 ;;
    *) mistake "--slice=$1: must be v4-16, 32, 64, 128 ... 2048 or v5e-16, 32, 64, 128, 256" ;;
  esac
  if [[ $1 == v4-* ]]; then
    SLICE_TYPE=$1 SLICE_RUNTIME=tpu-ubuntu2204-base
    SLICE_GKE=tpu-v4-podslice SLICE_MACHINE=ct4p-hightpu-4t
  else
    SLICE_TYPE=v5litepod-${1#v5e-} SLICE_RUNTIME=v2-alpha-tpuv5-lite
    SLICE_GKE=tpu-v5-lite-podslice SLICE_MACHINE=ct5lp-hightpu-4t
  fi
}
