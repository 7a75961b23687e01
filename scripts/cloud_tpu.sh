#!/usr/bin/env bash
# Jobs on Cloud TPU slices, with gcloud: docs/cloud_tpu.md walks through it.
#
#   scripts/cloud_tpu.sh COMMAND --name=NAME --zone=ZONE [OPTIONS] [-- ARGUMENTS]
#
#   create     asks for the slices as a queued resource
#   wait       returns when they are there
#   setup      puts this commit of m4 and its environment on every host
#   start      starts `m4 ARGUMENTS` on every host, e.g. -- train --gin_file=... --model_dir=gs://...
#   logs       follows the log of one host
#   status     the queued resource, and the job on every host
#   stop       ends the job on every host; it saves its step first
#   supervise  create, wait, setup, start, and again after every preemption, until the job is done
#   delete     gives the slices back
#
#   --name=NAME           of the queued resource       --zone=ZONE      e.g. us-central2-b
#   --slice=v4-128        v4-, v5e-, v5p- or v6e-...   --slices=1       so many of them, as one
#   --spot                cheaper, can be preempted    --project=PROJECT  default: gcloud's
#   --gcloud=FLAG         more of gcloud's flags when slices are asked for, each with its own
#                         --gcloud: --gcloud=--reserved --gcloud=--service-account=...
#   --env=NAME=VALUE      for m4 on every host, may be repeated: LIBTPU_INIT_ARGS, XLA_FLAGS ...
#   --internal_ip         ssh to internal addresses    --tunnel_through_iap  ssh through IAP
#   --job=NAME            of the job and its log; default: train, or the first of ARGUMENTS
#   --worker=0 --slice_index=0  whose log
#   --runtime_version=V   the VMs' image; default: the slice's own
#   --poll_seconds=60     how often the queue and the job are looked at
#   --unreachable_minutes=15  a host that does not answer for so long: the slices are asked for again
#   --stall_minutes=60    a job that writes nothing for so long is started again; 0: never
#   --max_restarts=20     such failures, crashes and refusals that `supervise` tolerates, in addition
#                         to preemptions
#   --dry_run             prints every command, one a line, and runs nothing
#   --help                prints this
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/common.sh
source "$root/scripts/common.sh"

VALUES=(name zone slice slices project job runtime_version worker slice_index poll_seconds
  unreachable_minutes stall_minutes max_restarts)
LISTS=(env gcloud) SWITCHES=(spot internal_ip tunnel_through_iap dry_run)
name="" zone="" slice="" project="" job="" runtime_version="" slices=1 worker=0 slice_index=0
poll_seconds=60 unreachable_minutes=15 stall_minutes=60 max_restarts=20
env=() gcloud=() arguments=() spot=false internal_ip=false tunnel_through_iap=false

check() {
  command -v timeout >/dev/null || mistake "needs GNU timeout (coreutils)"
  $dry_run || command -v gcloud >/dev/null ||
    mistake "gcloud is not on the PATH: cloud.google.com/sdk/docs/install"
  need name "$name" zone "$zone"
  check_name name "$name"
  check_zone "$zone"
  whole_numbers slices "$slices" worker "$worker" slice_index "$slice_index" \
    poll_seconds "$poll_seconds" unreachable_minutes "$unreachable_minutes" \
    stall_minutes "$stall_minutes" max_restarts "$max_restarts"
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

# A command on every host, which none may hold up for ever. -n: `timeout` takes the terminal away.
on_all() {
  run timeout $((unreachable_minutes * 60 + 600)) \
    gcloud compute tpus queued-resources ssh "$name" "${WHERE[@]}" "${SSH[@]}" --ssh-flag=-n \
    --node=all --worker=all "--command=$1"
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

# The state of the queued resource: ACTIVE, WAITING_FOR_RESOURCES ...; NONE where there is none,
# UNKNOWN where gcloud cannot say now. What the user must change ends the script.
queue_state() {
  local said
  if said=$(queue describe '--format=value(state.state)' 2>&1); then
    echo "${said##*$'\n'}"
    return
  fi
  if [[ $said == *NOT_FOUND* ]]; then
    echo NONE
    return
  fi
  check_gcloud "$said" "$zone"
  say "$(error_line "$said")"
  echo UNKNOWN
}

# Sets `state` to the queued resource's; gives up where gcloud has failed so often without a break.
MOST_UNKNOWN=30 unknown=0
look() {
  state=$(queue_state) || exit
  if [[ $state != UNKNOWN ]]; then
    unknown=0
    return
  fi
  unknown=$((unknown + 1))
  if ((unknown >= MOST_UNKNOWN)); then
    say "gcloud failed $unknown times without a break: given up; the slices are left as they are"
    exit 1
  fi
  say "gcloud failed $unknown of at most $MOST_UNKNOWN times; will look again"
}

wait_for_slice() {
  if $dry_run; then
    when "every $poll_seconds s, until it says ACTIVE:"
    queue describe '--format=value(state.state)'
    return
  fi
  local state before=""
  while true; do
    look
    [[ $state == "$before" ]] || say "$name is $state"
    before=$state
    case $state in
      ACTIVE) return ;;
      NONE | FAILED | SUSPENDING | SUSPENDED | DELETING)
        say "$name is not coming; delete and create it again"
        return 1
        ;;
    esac
    sleep "$poll_seconds"
  done
}

setup() {
  # What runs can be named by a commit, and is the same on every host.
  if ! $dry_run && [[ -n $(git -C "$root" status --porcelain) ]]; then
    mistake "there are changes that are not committed: hosts get the commit, commit them first"
  fi
  # && where a caller asks for the status: errexit is off there.
  run mkdir -p "$root/dist" &&
    run git -C "$root" archive --format=tar.gz --prefix=m4/ "--output=$root/dist/m4.tar.gz" HEAD &&
    run timeout $((unreachable_minutes * 60 + 600)) \
      gcloud compute tpus queued-resources scp "$root/dist/m4.tar.gz" "$name:m4.tar.gz" \
      "${WHERE[@]}" "${SSH[@]}" --node=all --worker=all &&
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

# What every host says of the job, where ARGUMENTS are given of the one that was started with them.
# A host without the environment says: m4-job HOST bare.
ask_hosts() {
  local words=()
  if ((${#arguments[@]})); then words=("${env[@]}" "${arguments[@]}"); fi
  on_all "if test -e m4-env/.ready; then $(on_host status "$job" "${words[@]}"); else echo m4-job \$(hostname) bare; fi"
}

status() {
  queue describe '--format=value(state.state)'
  ask_hosts
}

# One word for the job on all hosts, from what they say: unreachable, other, bare, refused, mistake,
# interrupted, crashed, stalled, running, finished, none.
job_state() {
  local said states quiet
  said=$(ask_hosts 2>&1) || {
    say "${said##*$'\n'}"
    echo unreachable
    return
  }
  said=$(sed -n 's/^.*m4-job [^ ]* //p' <<<"$said")
  if (($(grep -c . <<<"$said") < SLICE_HOSTS * slices)); then
    say "fewer answers than the $((SLICE_HOSTS * slices)) hosts"
    echo unreachable
    return
  fi
  # Process 0 writes for all.
  quiet=$(sed -n 's/^running //p' <<<"$said" | sort -n | head -n 1)
  # Each word once; 130 and 143 are what SIGINT and SIGTERM leave.
  states=" $(sed -E 's/^failed (130|143)$/stopped/; s/^running .*/running/' <<<"$said" |
    sort -u | paste -sd, | sed 's/,/ , /g') "
  case $states in
    *" other "*) echo other ;;
    *" bare "*) echo bare ;;
    *" refused "*) echo refused ;;
    *" failed 2 "*) echo mistake ;; # m4's exit status for what the user must change
    *" failed "* | *" lost "*) echo crashed ;;
    *" stopped "*) echo interrupted ;;
    " running " | " finished , running ")
      if ((stall_minutes > 0 && quiet >= stall_minutes * 60)); then echo stalled; else echo running; fi
      ;;
    " finished ") echo finished ;;
    " none ") echo none ;;
    *) echo crashed ;; # started on some hosts only
  esac
}

# Looks at the slice and the job and does what is next, again and again. It keeps nothing in mind
# but the number of failures, whether it has seen the job and since when a host is silent: it can be
# ended and started at any time, on any machine.
supervise() {
  describe_slice "$slice"
  if $dry_run; then
    show_supervise
    return
  fi
  local failures=0 state before="" seen=false asked silent_since=""
  while true; do
    asked=$SECONDS
    look
    if [[ $state == ACTIVE ]]; then state="ACTIVE, job $(job_state)"; fi
    [[ $state == "$before" ]] || say "$name is $state"
    before=$state
    if [[ $state == *unreachable ]]; then
      silent_since=${silent_since:-$asked}
    else
      silent_since=""
    fi
    case $state in
      NONE)
        check_corpus "$project" "${arguments[@]}"
        create || fail "the slice could not be asked for"
        ;;
      SUSPENDED) # preempted
        recreate || fail "the slice could not be asked for"
        ;;
      FAILED)
        fail "the slice was refused"
        recreate || fail "the slice could not be asked for"
        ;;
      "ACTIVE, job finished") return ;;
      "ACTIVE, job other")
        mistake "$name has a job '$job' with other arguments (~/m4-jobs/$job/arguments on its" \
          "hosts): give this one another name, --job=NAME"
        ;;
      "ACTIVE, job mistake" | "ACTIVE, job refused")
        if $seen && [[ $state == *mistake ]]; then
          stop || true # a host that does not answer hides no mistake
          mistake "m4 refused to start or to continue (see logs, or MODEL_DIR/logs); with the mistake" \
            "corrected start this again"
        fi
        # Refused before this was started: the user has corrected it, in the arguments or in a file
        # of the commit, which the hosts do not have yet.
        say "m4 refused to start; will retry once, with this commit"
        { stop && setup && start; } || fail "the hosts could not be set up"
        before=""
        ;;
      "ACTIVE, job bare")
        # The slice can be preempted at any moment; the next check finds out.
        { setup && start; } || fail "the hosts could not be set up"
        before=""
        ;;
      "ACTIVE, job unreachable")
        say "a host has not answered for $(((SECONDS - silent_since) / 60)) of at most" \
          "$unreachable_minutes minutes"
        if ((SECONDS - silent_since >= unreachable_minutes * 60)); then
          fail "a host does not answer"
          recreate || fail "the slice could not be asked for"
          silent_since=""
        fi
        ;;
      "ACTIVE, job none" | "ACTIVE, job interrupted" | "ACTIVE, job crashed" | "ACTIVE, job stalled")
        case $state in
          *crashed) fail "the job crashed (see logs, or MODEL_DIR/logs)" ;;
          *stalled) fail "the job has written nothing for $stall_minutes minutes" ;;
        esac
        # A host that is left behind waits for the others for ever.
        { stop && start; } || fail "the job could not be started"
        before=""
        ;;
    esac
    if [[ $state == "ACTIVE, job "* && $state != *unreachable ]]; then seen=true; fi
    sleep "$poll_seconds"
  done
}

recreate() { queue delete --force --quiet && create; }

# One more of `supervise`'s failures; ends the script where there are too many.
fail() {
  failures=$((failures + 1))
  if ((failures > max_restarts)); then
    say "$1: failure $failures (--max_restarts=$max_restarts); the slice is left as it is"
    exit 1
  fi
  say "$1: failure $failures of at most $max_restarts"
}

show_supervise() {
  when "where there is no such queued resource:"
  check_corpus "$project" "${arguments[@]}"
  create
  when "every $poll_seconds s:"
  queue describe '--format=value(state.state)'
  when "where it is ACTIVE:"
  ask_hosts
  when "where a host has no environment (a new slice):"
  setup
  start
  when "where a host has a job $job with other arguments: refuses, --job=NAME gives another name"
  when "where m4 had refused a job $job, with any arguments, before this was started; later it ends:"
  stop
  setup
  start
  when "where the job has ended on a host without being finished, or writes nothing for" \
    "$stall_minutes minutes:"
  stop
  start
  when "where the slice is SUSPENDED (preempted) or FAILED, or a host does not answer for" \
    "$unreachable_minutes minutes:"
  recreate
}

show_help "$@"
command=${1:-}
[[ $command =~ ^(create|wait|setup|start|logs|status|stop|supervise|delete)$ ]] ||
  mistake "command '$command': must be create, wait, setup, start, logs, status, stop, supervise or delete"
shift
parse "$@"
check
case $command in
  start | supervise)
    check_job "${arguments[@]:0:1}"
    job=${job:-${arguments[0]}}
    ;;
  *) ((${#arguments[@]} == 0)) || mistake "$command takes nothing behind --" ;;
esac
job=${job:-train}
check_name job "$job"
case $command in
  supervise)
    need slice "$slice"
    supervise
    ;;
  wait) wait_for_slice ;;
  delete) queue delete --force --quiet ;;
  *) "$command" ;;
esac
