# Functions of all scripts: options, mistakes in one line, commands that are shown or run, slices.
# Bash 4.4 or later sources it.
# shellcheck shell=bash

((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || {
  echo "$(basename "$0"): needs bash 4.4 or later" >&2
  exit 2
}
shopt -s inherit_errexit

dry_run=false

# Ends the script for a mistake of the user's: one line, exit status 2.
mistake() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 2
}

# Prints a line of the script's own, apart from the output of commands.
say() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }

# Prints words as they would be typed, quoted where the shell needs it.
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
  if $dry_run; then quoted "$@"; else "$@"; fi
}

# With --dry_run, says when the commands that follow are run.
when() {
  if $dry_run; then printf '# %s\n' "$*"; fi
}

# With --help in front of --, prints the head of the script and ends.
show_help() {
  local word
  for word in "$@"; do
    case $word in
      --) return ;;
      --help | -h)
        sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
        exit
        ;;
    esac
  done
}

# Sets the variables of the options. VALUES (--name=VALUE), LISTS (may be repeated) and SWITCHES
# (--name: true) name them. `arguments` gets the words after --.
parse() {
  local _option
  while (($#)); do
    _option=${1#--}
    _option=${_option%%=*}
    if [[ $1 == -- ]]; then
      # shellcheck disable=SC2034  # the scripts that source this use it
      arguments=("${@:2}")
      return
    elif [[ $1 == "--$_option="* && " ${VALUES[*]} " == *" $_option "* ]]; then
      printf -v "$_option" %s "${1#*=}"
    elif [[ $1 == "--$_option="* && " ${LISTS[*]} " == *" $_option "* ]]; then
      local -n _list=$_option
      _list+=("${1#*=}")
    elif [[ $1 == "--$_option" && " ${SWITCHES[*]} " == *" $_option "* ]]; then
      printf -v "$_option" true
    else
      mistake "option $1 is not known, or has no =VALUE; see the head of $0"
    fi
    shift
  done
}

# need name "$name" ...: ends the script where an option has no value.
need() {
  while (($#)); do
    [[ -n $2 ]] || mistake "--$1=... is missing"
    shift 2
  done
}

# whole_numbers name "$name" ...
whole_numbers() {
  while (($#)); do
    [[ $2 =~ ^[0-9]{1,9}$ ]] || mistake "--$1=$2: must be a whole number"
    shift 2
  done
}

# Names of machines, jobs and labels: Google Cloud and Kubernetes both take these.
check_name() {
  [[ $2 =~ ^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$ ]] ||
    mistake "--$1=$2: 1 to 40 of a-z, 0-9 and -, a letter first, no - at the end"
}

check_zone() {
  [[ $1 =~ ^[a-z]+-[a-z]+[0-9]+-[a-z]$ ]] || mistake "--zone=$1: e.g. us-central2-b"
}

# check_lists ENV GCLOUD: checks the words of both lists, given by name.
check_lists() {
  local -n variables=$1 flags=$2
  local word
  for word in "${variables[@]}"; do
    [[ $word =~ ^[A-Za-z_][A-Za-z0-9_]*= && $word != *[[:cntrl:]]* ]] ||
      mistake "--env=$word: must be NAME=VALUE, on one line"
  done
  for word in "${flags[@]}"; do
    [[ $word == --* ]] || mistake "--gcloud=$word: must be a flag of gcloud's, e.g. --gcloud=--reserved"
  done
}

# Checks the job of m4 behind --. Other jobs than these use one machine.
check_job() {
  case ${1:-} in
    train | decode | eval) ;;
    "") mistake "no job: put it behind --, e.g. -- train --gin_file=gin_configs/v4_128.gin" ;;
    *) mistake "job '$1': must be train, decode or eval" ;;
  esac
}

# Prints the line of gcloud's output that says what is wrong.
error_line() { grep -m 1 ERROR <<<"$1" || echo "gcloud: ${1%%$'\n'*}"; }

# check_gcloud OUTPUT ZONE: ends the script where gcloud's output names what the user must change.
check_gcloud() {
  local line
  line=$(error_line "$1")
  case $1 in
    # A login that the network did not let gcloud renew is no mistake either.
    *UNAVAILABLE* | *DEADLINE_EXCEEDED* | *"Max retries"* | *onnection* | *"timed out"*) ;;
    *"not found in zone"*)
      mistake "$line; what this zone has: gcloud compute tpus accelerator-types list --zone=$2"
      ;;
    *"[project]"*) mistake "gcloud has no project: --project=..., or gcloud config set project" ;;
    *UNAUTHENTICATED* | *"active account"* | *credentials* | *"gcloud auth login"*)
      mistake "$line (gcloud auth login)"
      ;;
    *PROJECT_DENIED* | *PERMISSION_DENIED* | *INVALID_ARGUMENT*) mistake "$line" ;;
  esac
}

# check_corpus PROJECT ARGUMENTS: ends the script where m4's arguments name a corpus in a bucket that
# is not there: one host of a slice would tokenize the text, while all others are paid for.
check_corpus() {
  local place said project=$1
  place=$(printf '%s\n' "${@:2}" |
    sed -nE "s|^--gin\.experiment\.Data\.data_dir=['\"]?(gs://[^'\"]+)['\"]?$|\1|p" | tail -n 1)
  if [[ -z $place ]]; then return; fi
  place=${place%/}
  when "ends where there is no corpus:"
  local ask=(gcloud storage ls "$place/*/manifest.json" ${project:+"--project=$project"})
  if $dry_run; then
    run "${ask[@]}"
  elif ! said=$("${ask[@]}" 2>&1); then
    [[ $said != *"matched no objects"* ]] ||
      mistake "no corpus at $place: m4 data prepare makes it, on a machine without TPUs" \
        "(docs/cloud_tpu.md, 2)"
    say "${said%%$'\n'*}" # the hosts may have a right that this machine lacks
  fi
}

# Kinds of slices: the number in a name counts so many cores a chip; dimensions of the torus, fewest
# and most chips; Cloud TPU's accelerator type and image of the VMs, GKE's label and machine type.
# From docs.cloud.google.com: tpu/docs/v4 to tpu7x, tpu/docs/runtimes and
# kubernetes-engine/docs/concepts/plan-tpus. Cloud TPU's own API does not have tpu7x.
_KINDS="
v4    2 3 4 2048 v4        tpu-ubuntu2204-base tpu-v4-podslice      ct4p-hightpu
v5e   1 2 1 256  v5litepod v2-alpha-tpuv5-lite tpu-v5-lite-podslice ct5lp-hightpu
v5p   2 3 4 4096 v5p       v2-alpha-tpuv5      tpu-v5p-slice        ct5p-hightpu
v6e   1 2 1 256  v6e       v2-alpha-tpuv6e     tpu-v6e-slice        ct6e-standard
tpu7x 2 3 1 4096 tpu7x     none                tpu7x                tpu7x-standard
"
_TOPOLOGIES_2="1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"
_TOPOLOGIES_3="1x1x1 2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16"

# Sets what a slice is: SLICE_TYPE (Cloud TPU's accelerator type), SLICE_RUNTIME (the VMs' image),
# SLICE_TOPOLOGY (chips), SLICE_HOSTS, SLICE_CHIPS (of a host), SLICE_GKE (GKE's label) and
# SLICE_MACHINE (GKE's machine type).
# shellcheck disable=SC2034  # the scripts that source this use them
describe_slice() {
  local kind cores dimensions fewest most type runtime label machine topology chips allowed kinds=""
  while read -r kind cores dimensions fewest most type runtime label machine; do
    [[ -n $kind ]] || continue
    kinds+="${kinds:+, }$kind-$((fewest * cores)) to $((most * cores))"
    [[ $1 == "$kind"-* ]] || continue
    allowed=""
    local topologies=_TOPOLOGIES_$dimensions
    for topology in ${!topologies}; do
      chips=$((${topology//x/*}))
      ((fewest <= chips && chips <= most)) || continue
      allowed+="${allowed:+, }$((chips * cores))"
      [[ $1 == "$kind-$((chips * cores))" ]] || continue
      SLICE_TYPE=$type-$((chips * cores)) SLICE_RUNTIME=$runtime SLICE_TOPOLOGY=$topology
      SLICE_CHIPS=4 SLICE_GKE=$label
      # A single host has them all: 1, 4 or, in two dimensions, 8.
      if ((chips == 1 || (dimensions == 2 && chips == 8))); then SLICE_CHIPS=$chips; fi
      SLICE_HOSTS=$((chips / SLICE_CHIPS)) SLICE_MACHINE=$machine-${SLICE_CHIPS}t
      return
    done
    mistake "--slice=$1: $kind has $allowed"
  done <<<"$_KINDS"
  mistake "--slice=$1: must be $kinds, by powers of two"
}
