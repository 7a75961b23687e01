#!/usr/bin/env bash
# Runs jobs on Cloud TPU slices, with gcloud: docs/cloud_tpu.md walks through it.
#
#   scripts/cloud_tpu.sh COMMAND --name=NAME --zone=ZONE [OPTIONS] [-- ARGUMENTS]
#
#   create   requests the slices as a queued resource
#   wait     returns when they are there
#   setup    puts this commit of m4 and its environment on every host
#   start    starts `m4 ARGUMENTS` on every host, e.g. -- train --gin_file=... --model_dir=gs://...
#   launch   create, wait, setup and start, one after the other
#   logs     follows the log of one host
#   status   prints the state of the queued resource, and of the job on every host
#   stop     ends the job on every host, which saves its step first
#   delete   gives the slices back
#
#   --name=NAME           of the queued resource       --zone=ZONE      e.g. us-central2-b
#   --slice=v4-128        v4-, v5e-, v5p- or v6e-...   --slices=1       number of slices, as one
#   --spot                cheaper, can be preempted    --project=PROJECT  default: gcloud's
#   --gcloud=FLAG         a further flag for gcloud when slices are requested, may be repeated:
#                         --gcloud=--reserved --gcloud=--service-account=...
#   --env=NAME=VALUE      for m4 on every host, may be repeated: LIBTPU_INIT_ARGS, XLA_FLAGS ...
#   --internal_ip         ssh to internal addresses    --tunnel_through_iap  ssh through IAP
#   --job=NAME            name of the job and its log; default: train, or the first of ARGUMENTS
#   --worker=0 --slice_index=0  the host whose log is shown
#   --runtime_version=V   image of the VMs; default: the slice's own
#   --poll_seconds=60     seconds between two looks at the queue
#   --dry_run             prints every command, one a line, and runs nothing
#   --help                prints this
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/common.sh
source "$root/scripts/common.sh"

VALUES=(name zone slice slices project job runtime_version worker slice_index poll_seconds)
LISTS=(env gcloud) SWITCHES=(spot internal_ip tunnel_through_iap dry_run)
name="" zone="" slice="" project="" job="" runtime_version="" slices=1 worker=0 slice_index=0
poll_seconds=60
env=() gcloud=() arguments=() spot=false internal_ip=false tunnel_through_iap=false

check() {
  command -v timeout >/dev/null || mistake "needs GNU timeout (coreutils)"
  $dry_run || command -v gcloud >/dev/null ||
    mistake "gcloud is not on the PATH: cloud.google.com/sdk/docs/install"
  need name "$name" zone "$zone"
  check_name name "$name"
  check_zone "$zone"
  whole_numbers slices "$slices" worker "$worker" slice_index "$slice_index" \
    poll_seconds "$poll_seconds"
  ((slices > 0)) || mistake "--slices=$slices: must be 1 or more"
  check_lists env gcloud
  if $internal_ip && $tunnel_through_iap; then
    mistake "--internal_ip and --tunnel_through_iap: only one of them"
  fi
  WHERE=("--zone=$zone" ${project:+"--project=$project"})
  # gcloud would ask for a passphrase when it makes its first key.
  SSH=(--quiet)
  if $internal_ip; then SSH+=(--internal-ip); fi
  if $tunnel_through_iap; then SSH+=(--tunnel-through-iap); fi
}

queue() { run gcloud compute tpus queued-resources "$1" "$name" "${WHERE[@]}" "${@:2}"; }

# Runs a command on every host; a host that does not answer ends it. -n: `timeout` takes the
# terminal away.
MOST_SECONDS=1500
on_all() {
  run timeout $MOST_SECONDS gcloud compute tpus queued-resources ssh "$name" "${WHERE[@]}" "${SSH[@]}" \
    --ssh-flag=-n --node=all --worker=all "--command=$1"
}

create() {
  need slice "$slice"
  describe_slice "$slice"
  [[ $SLICE_RUNTIME != none ]] ||
    mistake "--slice=$slice: Cloud TPU's API does not have it, GKE does: scripts/gke.sh"
  local flags=("--node-id=$name")
  if ((slices > 1)); then flags=("--node-count=$slices" "--node-prefix=$name"); fi
  flags+=("--accelerator-type=$SLICE_TYPE" "--runtime-version=${runtime_version:-$SLICE_RUNTIME}")
  if $spot; then flags+=(--spot); fi
  flags+=("${gcloud[@]}")
  if $dry_run; then
    queue create "${flags[@]}"
    return
  fi
  local said
  said=$(queue create "${flags[@]}" 2>&1) || {
    check_gcloud "$said" "$zone"
    printf '%s\n' "$said" >&2
    return 1
  }
  printf '%s\n' "$said" >&2
}

# gcloud may fail this often without a break.
MOST_FAILURES=30
wait_for_slice() {
  if $dry_run; then
    when "every $poll_seconds s, until it says ACTIVE:"
    queue describe '--format=value(state.state)'
    return
  fi
  local said before="" failures=0
  while true; do
    if said=$(queue describe '--format=value(state.state)' 2>&1); then
      failures=0 said=${said##*$'\n'}
    else
      # Ends the script where the user must change something.
      check_gcloud "$said" "$zone"
      [[ $said != *NOT_FOUND* ]] || mistake "there is no queued resource $name in $zone: create it"
      failures=$((failures + 1))
      say "$(error_line "$said"); failure $failures of at most $MOST_FAILURES"
      ((failures < MOST_FAILURES)) || exit 1
      said=""
    fi
    [[ -z $said || $said == "$before" ]] || say "$name is $said"
    before=${said:-$before}
    case $said in
      ACTIVE) return ;;
      FAILED | SUSPENDING | SUSPENDED | DELETING)
        say "$name is not coming; delete and create it again"
        exit 1
        ;;
    esac
    sleep "$poll_seconds"
  done
}

# What runs is then named by a commit, and is the same on every host.
check_committed() {
  if ! $dry_run && [[ -n $(git -C "$root" status --porcelain) ]]; then
    mistake "there are changes that are not committed: hosts get the commit, commit them first"
  fi
}

setup() {
  check_committed
  run mkdir -p "$root/dist"
  run git -C "$root" archive --format=tar.gz --prefix=m4/ "--output=$root/dist/m4.tar.gz" HEAD
  run timeout $MOST_SECONDS gcloud compute tpus queued-resources scp "$root/dist/m4.tar.gz" \
    "$name:m4.tar.gz" "${WHERE[@]}" "${SSH[@]}" --node=all --worker=all
  on_all "rm -rf m4 && tar -xzf m4.tar.gz && bash m4/scripts/tpu_host.sh setup"
}

on_host() { quoted bash m4/scripts/tpu_host.sh "$@"; }

start() {
  on_all "$(on_host start "$job" "${env[@]}" "${arguments[@]}")"
}

stop() { on_all "$(on_host stop "$job")"; }

logs() {
  queue ssh "${SSH[@]}" "--node=$slice_index" "--worker=$worker" \
    "--command=$(on_host follow "$job")"
}

status() {
  queue describe '--format=value(state.state)'
  on_all "$(on_host status "$job")"
}

launch() {
  check_committed
  check_corpus "$project" "${arguments[@]}"
  create
  wait_for_slice
  setup
  start
}

show_help "$@"
command=${1:-}
[[ $command =~ ^(create|wait|setup|start|launch|logs|status|stop|delete)$ ]] ||
  mistake "command '$command': must be create, wait, setup, start, launch, logs, status, stop or delete"
shift
parse "$@"
check
case $command in
  start | launch)
    check_job "${arguments[@]:0:1}"
    job=${job:-${arguments[0]}}
    ;;
  *) ((${#arguments[@]} == 0)) || mistake "$command takes nothing behind --" ;;
esac
job=${job:-train}
check_name job "$job"
case $command in
  wait) wait_for_slice ;;
  delete) queue delete --force --quiet ;;
  *) "$command" ;;
esac
