#!/usr/bin/env bash
# Jobs on Cloud TPU slices, with gcloud: docs/cloud_tpu.md walks through it.
#
#   scripts/cloud_tpu.sh COMMAND --name=NAME --zone=ZONE [OPTIONS] [-- ARGUMENTS]
#
#   create     asks for the slice as a queued resource; behind --: more of gcloud's flags
#   wait       returns when the slice is there
#   setup      puts this commit of m4 and its environment on every host
#   start      starts `m4 ARGUMENTS` on every host, e.g. -- train --gin_file=... --model_dir=gs://...
#   logs       follows the log of one host
#   status     the slice, and the job on every host
#   stop       ends the job on every host; it saves its step first
#   supervise  create, wait, setup, start, and again after every preemption, until the job is done
#   delete     gives the slice back
#
#   --name=NAME           of the slice                 --zone=ZONE     e.g. us-central2-b
#   --slice=v4-128        v4-... or v5e-...            --spot          cheaper, can be preempted
#   --job=NAME            of the job and its log; default: train, or the first of ARGUMENTS
#   --project=PROJECT     default: gcloud's            --worker=0      whose log
#   --runtime_version=V   the VMs' image; default: the slice's own
#   --poll_seconds=60     how often the queue and the job are looked at
#   --max_restarts=20     crashes and refusals that `supervise` tolerates, in addition to preemptions
#   --dry_run             prints every command, one a line, and runs nothing
set -euo pipefail
shopt -s inherit_errexit

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/common.sh
source "$root/scripts/common.sh"

name="" zone="" slice="" project="" job="" runtime_version=""
spot=false worker=0 poll_seconds=60 max_restarts=20 arguments=()

parse() {
  while (($#)); do
    case $1 in
      --name=*) name=${1#*=} ;;
      --zone=*) zone=${1#*=} ;;
      --slice=*) slice=${1#*=} ;;
      --project=*) project=${1#*=} ;;
      --job=*) job=${1#*=} ;;
      --runtime_version=*) runtime_version=${1#*=} ;;
      --worker=*) worker=${1#*=} ;;
      --poll_seconds=*) poll_seconds=${1#*=} ;;
      --max_restarts=*) max_restarts=${1#*=} ;;
      --spot) spot=true ;;
      --dry_run) DRY_RUN=true ;;
      --)
        shift
        arguments=("$@")
        break
        ;;
      *) mistake "option $1 is not known, or has no =VALUE; see the head of $0" ;;
    esac
    shift
  done
  need name "$name" zone "$zone"
  check_name name "$name"
  [[ $zone =~ ^[a-z]+-[a-z]+[0-9]+-[a-z]$ ]] || mistake "--zone=$zone: e.g. us-central2-b"
  whole_number worker "$worker"
  whole_number poll_seconds "$poll_seconds"
  whole_number max_restarts "$max_restarts"
}

# gcloud's arguments that every command has.
where() { WHERE=("--zone=$zone" ${project:+"--project=$project"}); }

queue() { run gcloud compute tpus queued-resources "$1" "$name" "${WHERE[@]}" "${@:2}"; }

# A command on every host.
on_all() { on_worker all "$1"; }

# --quiet: gcloud would ask for a passphrase when it makes its first key.
on_worker() {
  run gcloud compute tpus tpu-vm ssh "$name" "${WHERE[@]}" --quiet "--worker=$1" "--command=$2"
}

create() {
  need slice "$slice"
  describe_slice "$slice"
  local flags=()
  if $spot; then flags+=(--spot); fi
  queue create "--node-id=$name" "--accelerator-type=$SLICE_TYPE" \
    "--runtime-version=${runtime_version:-$SLICE_RUNTIME}" "${flags[@]}" "$@"
}

# The state of the queued resource: ACTIVE, WAITING_FOR_RESOURCES ...; NONE where there is none,
# UNKNOWN where gcloud does not say.
queue_state() {
  local said
  if said=$(queue describe '--format=value(state.state)' 2>&1); then
    echo "${said##*$'\n'}"
  elif [[ $said == *NOT_FOUND* ]]; then
    echo NONE
  else
    say "$said"
    echo UNKNOWN
  fi
}

wait_for_slice() {
  if $DRY_RUN; then
    when "every $poll_seconds s, until it says ACTIVE:"
    queue describe '--format=value(state.state)'
    return
  fi
  local state before=""
  while true; do
    state=$(queue_state)
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
  if ! $DRY_RUN && [[ -n $(git -C "$root" status --porcelain) ]]; then
    mistake "there are changes that are not committed: hosts get the commit, commit them first"
  fi
  # && where a caller asks for the status: errexit is off there.
  run mkdir -p "$root/dist" &&
    run git -C "$root" archive --format=tar.gz --prefix=m4/ "--output=$root/dist/m4.tar.gz" HEAD &&
    run gcloud compute tpus tpu-vm scp "$root/dist/m4.tar.gz" "$name:m4.tar.gz" "${WHERE[@]}" \
      --quiet --worker=all &&
    on_all "rm -rf m4 && tar -xzf m4.tar.gz && bash m4/scripts/tpu_host.sh setup"
}

on_host() { quoted bash m4/scripts/tpu_host.sh "$@"; }

start() {
  on_all "$(on_host start "$job" "${arguments[@]}")"
}

stop() { on_all "$(on_host stop "$job")"; }

logs() { on_worker "$worker" "$(on_host follow "$job")"; }

# What every host says of the job, where ARGUMENTS are given of the one that was started with them.
# A host without the environment says: m4-job HOST bare.
ask_hosts() {
  on_all "if test -e m4-env/.ready; then $(on_host status "$job" "${arguments[@]}"); else echo m4-job \$(hostname) bare; fi"
}

status() {
  queue describe '--format=value(state.state)'
  ask_hosts
}

# One word for the job on all hosts, from what they say: unreachable, other, bare, refused, mistake,
# interrupted, crashed, running, finished, none.
job_state() {
  local said states
  said=$(ask_hosts 2>/dev/null) || {
    echo unreachable
    return
  }
  # Each word once; 130 and 143 are what SIGINT and SIGTERM leave.
  states=" $(sed -n 's/^.*m4-job [^ ]* //p' <<<"$said" | sed -E 's/^failed (130|143)$/stopped/' |
    sort -u | paste -sd, | sed 's/,/ , /g') "
  case $states in
    "  ") echo unreachable ;;
    *" other "*) echo other ;;
    *" bare "*) echo bare ;;
    *" refused "*) echo refused ;;
    *" failed 2 "*) echo mistake ;; # m4's exit status for what the user must change
    *" failed "* | *" lost "*) echo crashed ;;
    *" stopped "*) echo interrupted ;;
    " running " | " finished , running ") echo running ;;
    " finished ") echo finished ;;
    " none ") echo none ;;
    *) echo crashed ;; # started on some hosts only
  esac
}

# Looks at the slice and the job and does what is next, again and again. It keeps nothing in mind
# but the number of failures and whether it has seen the job: it can be ended and started at any time,
# on any machine.
supervise() {
  if $DRY_RUN; then
    show_supervise
    return
  fi
  local failures=0 state before="" seen=false
  while true; do
    state=$(queue_state)
    if [[ $state == ACTIVE ]]; then state="ACTIVE, job $(job_state)"; fi
    [[ $state == "$before" ]] || say "$name is $state"
    before=$state
    case $state in
      NONE) create || fail "the slice could not be asked for" ;;
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
          stop
          mistake "m4 refused to start or to go on: see logs; with the mistake put right start this again"
        fi
        # Refused before this was started: the user has put it right, in the arguments or in a file
        # of the commit, which the hosts do not have yet.
        say "m4 refused to start; it is tried once more, with this commit"
        { stop && setup && start; } || fail "the hosts could not be set up"
        before=""
        ;;
      "ACTIVE, job bare")
        # The slice can be preempted at any moment; the next check finds out.
        { setup && start; } || fail "the hosts could not be set up"
        before=""
        ;;
      "ACTIVE, job none" | "ACTIVE, job interrupted" | "ACTIVE, job crashed")
        if [[ $state == *crashed ]]; then fail "the job crashed"; fi
        # A host that is left behind waits for the others for ever.
        { stop && start; } || say "the job could not be started"
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
  when "where the job has ended on a host without being finished:"
  stop
  start
  when "where the slice is SUSPENDED (preempted) or FAILED:"
  recreate
}

((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || mistake "needs bash 4.4 or later"
command=${1:-}
[[ $command =~ ^(create|wait|setup|start|logs|status|stop|supervise|delete)$ ]] ||
  mistake "command '$command': must be create, wait, setup, start, logs, status, stop, supervise or delete"
shift
parse "$@"
where
case $command in
  start | supervise)
    check_job "${arguments[@]:0:1}"
    job=${job:-${arguments[0]}}
    ;;
  create) ;; # gcloud's flags
  *) ((${#arguments[@]} == 0)) || mistake "$command takes nothing behind --" ;;
esac
job=${job:-train}
check_name job "$job"
case $command in
  create) create "${arguments[@]}" ;;
  wait) wait_for_slice ;;
  delete) queue delete --force --quiet ;;
  *) "$command" ;;
esac
