#!/usr/bin/env bash
# Runs jobs on TPU slices of a GKE cluster, as a JobSet or with XPK: docs/cloud_tpu.md.
#
#   scripts/gke.sh COMMAND [OPTIONS] [-- ARGUMENTS]
#
#   image      builds the image from the Dockerfile and pushes it       --image
#   pool       adds a node pool for every slice                         --name --cluster --zone --slice
#   manifest   prints the JobSet that runs `m4 ARGUMENTS`               --name --image --slice
#   apply      gives that JobSet to the cluster
#   xpk        runs the same job by XPK                                 ... --cluster --zone
#   status     shows the JobSet, its pods                               --name
#   logs       follows the log of one host                              --name
#   delete     ends the job: it saves its step first                    --name
#
#   --name=NAME          of the job or the pool       --image=IMAGE    repository/name:tag
#   --slice=v4-128       v4-, v5e-, v5p-, v6e- or tpu7x-...            --slices=1  number of them
#   --cluster=NAME       --zone=ZONE of the slices    --project=PROJECT  default: gcloud's
#   --location=PLACE     of the cluster: its region, or the zone of a zonal one; default: the region
#                        of --zone
#   --spot, --reservation=NAME, --flex_start  kind of capacity, for the pool and for the job
#   --gcloud=FLAG        a further flag of gcloud's for the pool, may be repeated
#   --env=NAME=VALUE     for m4 in every pod, may be repeated: LIBTPU_INIT_ARGS, XLA_FLAGS ...
#   --service_account=N  Kubernetes' account that may read and write the bucket
#   --host_network       pods use the hosts' network: faster between slices, but without Workload
#                        Identity: they have the rights of the pool's own account
#   --stall_minutes=60   a job that writes nothing for this time is started again; 0: never
#   --max_restarts=100   restarts of the whole job; a preemption is one
#   --worker=0 --slice_index=0  the host whose log is shown
#   --dry_run            prints every command, one a line, and runs nothing
#   --help               prints this
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/common.sh
source "$root/scripts/common.sh"

VALUES=(name image slice slices cluster zone location project reservation service_account
  stall_minutes max_restarts worker slice_index)
LISTS=(env gcloud) SWITCHES=(spot flex_start host_network dry_run)
name="" image="" slice="" cluster="" zone="" location="" project="" reservation=""
service_account="" slices=1 stall_minutes=60 max_restarts=100 worker=0 slice_index=0
env=() gcloud=() arguments=() spot=false flex_start=false host_network=false

check() {
  whole_numbers slices "$slices" stall_minutes "$stall_minutes" max_restarts "$max_restarts" \
    worker "$worker" slice_index "$slice_index"
  ((slices > 0)) || mistake "--slices=$slices: must be 1 or more"
  [[ -z $name ]] || check_name name "$name"
  [[ -z $zone ]] || check_zone "$zone"
  [[ -z $location || $location =~ ^[a-z]+-[a-z]+[0-9]+(-[a-z])?$ ]] ||
    mistake "--location=$location: a region or a zone, e.g. us-west4 or us-west4-a"
  location=${location:-${zone%-*}}
  [[ -z $service_account ]] || check_name service_account "$service_account"
  [[ $reservation =~ ^[A-Za-z0-9_./-]*$ ]] || mistake "--reservation=$reservation: a name"
  [[ $image =~ ^[A-Za-z0-9_./:@-]*$ ]] || mistake "--image=$image: repository/name:tag"
  check_lists env gcloud
  local kinds="$spot $flex_start ${reservation:+true}"
  [[ $kinds != *true*true* ]] || mistake "--spot, --reservation and --flex_start: only one of them"
  if $host_network && [[ -n $service_account ]]; then
    mistake "--host_network switches Workload Identity off, which --service_account needs"
  fi
}

# Checks the slices of a job.
check_slices() {
  need slice "$slice"
  describe_slice "$slice"
  ((slices == 1 || SLICE_HOSTS > 1)) ||
    mistake "--slices=$slices: GKE joins slices of several hosts only, $slice has one"
}

image() {
  need image "$image"
  run docker build "--tag=$image" "$root"
  run docker push "$image"
}

pool() {
  need name "$name" cluster "$cluster" zone "$zone"
  check_slices
  local where=(${project:+"--project=$project"}) flags=() pools=("$name") each
  if ((slices > 1)); then
    pools=()
    for ((each = 0; each < slices; each++)); do pools+=("$name-$each"); done
  fi
  if ((SLICE_HOSTS > 1)) && [[ $SLICE_GKE == tpu7x ]]; then
    local policy=("m4-$SLICE_GKE-$SLICE_TOPOLOGY" "--region=${zone%-*}" "${where[@]}")
    when "where there is no such policy:"
    if $dry_run || ! gcloud compute resource-policies describe "${policy[@]}" >/dev/null 2>&1; then
      run gcloud compute resource-policies create workload-policy "${policy[@]}" \
        --type=HIGH_THROUGHPUT "--accelerator-topology=$SLICE_TOPOLOGY"
    fi
    flags+=("--placement-policy=${policy[0]}")
  elif ((SLICE_HOSTS > 1)); then
    flags+=("--tpu-topology=$SLICE_TOPOLOGY")
  fi
  if $flex_start; then
    flags+=(--flex-start --num-nodes=0 --enable-autoscaling "--max-nodes=$SLICE_HOSTS"
      --location-policy=ANY --reservation-affinity=none --no-enable-autorepair)
  else
    flags+=("--num-nodes=$SLICE_HOSTS")
  fi
  if $spot; then flags+=(--spot); fi
  if [[ -n $reservation ]]; then
    flags+=(--reservation-affinity=specific "--reservation=$reservation")
  fi
  when "the pools:"
  # GKE's own default scopes may only read the bucket.
  for each in "${pools[@]}"; do
    run gcloud container node-pools create "$each" "--cluster=$cluster" "--location=$location" \
      "--node-locations=$zone" "${where[@]}" "--machine-type=$SLICE_MACHINE" \
      --scopes=storage-full,gke-default,cloud-platform "${flags[@]}" "${gcloud[@]}"
  done
}

# Prints a YAML string in JSON's notation.
yaml() {
  local text=${1//\\/\\\\}
  text=${text//\"/\\\"}
  # Kubernetes puts variables in the place of $(NAME); $$( is $( itself.
  printf '"%s"' "${text//"\$("/"\$\$("}"
}

# line CONDITION INDENT TEXT: prints a line of the manifest where the condition is not empty.
line() {
  if [[ -n $1 ]]; then printf '%*s%s\n' "$2" "" "$3"; fi
}

# All hosts of a slice are one Job; one that fails fails the Job, and the JobSet restarts all of them.
# JobSet's own headless service names the pods, and GKE gives them TPU_WORKER_HOSTNAMES and, to
# several slices, MEGASCALE_COORDINATOR_ADDRESS and the like, which JAX and libtpu read.
manifest() {
  need name "$name" image "$image"
  check_slices
  local word
  cat <<YAML
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $name
  annotations:
    # One Job a node pool: a slice is never shared, nor a Job spread over two.
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  failurePolicy:
    maxRestarts: $max_restarts
    rules:
    - name: mistake
      action: FailJobSet
      onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
  - name: slice
    replicas: $slices
    template:
      spec:
        parallelism: $SLICE_HOSTS
        completions: $SLICE_HOSTS
        backoffLimit: 0
        podFailurePolicy:
          rules:
          # m4's exit status for what the user must change: starting it again would not help.
          - action: FailJob
            onExitCodes: {containerName: m4, operator: In, values: [2]}
        template:
          spec:
            restartPolicy: Never
            # m4 ends at SIGTERM, after the step that it is at is saved.
            terminationGracePeriodSeconds: 300
YAML
  if $host_network; then
    line yes 12 "hostNetwork: true"
    line yes 12 "dnsPolicy: ClusterFirstWithHostNet"
  fi
  line "$service_account" 12 "serviceAccountName: $(yaml "$service_account")"
  cat <<YAML
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: $SLICE_GKE
              cloud.google.com/gke-tpu-topology: $SLICE_TOPOLOGY
YAML
  if $spot; then line yes 14 'cloud.google.com/gke-spot: "true"'; fi
  if $flex_start; then line yes 14 'cloud.google.com/gke-flex-start: "true"'; fi
  line "$reservation" 14 "cloud.google.com/reservation-name: $(yaml "${reservation##*/}")"
  cat <<YAML
            containers:
            - name: m4
              image: $(yaml "$image")
              args:
YAML
  for word in "${arguments[@]}"; do line yes 14 "- $(yaml "$word")"; done
  if ((${#env[@]})); then line yes 14 "env:"; fi
  for word in "${env[@]}"; do
    line yes 14 "- name: ${word%%=*}"
    line yes 16 "value: $(yaml "${word#*=}")"
  done
  if ((stall_minutes > 0)); then
    cat <<YAML
              # Ends a pod whose job has made no progress.
              livenessProbe:
                exec:
                  command: [bash, /m4/scripts/tpu_host.sh, alive, "$stall_minutes"]
                periodSeconds: 60
                timeoutSeconds: 30
YAML
  fi
  cat <<YAML
              resources:
                limits:
                  google.com/tpu: $SLICE_CHIPS
YAML
}

apply() {
  local text
  text=$(manifest)
  if $dry_run; then
    local word options=()
    for word in "${words[@]:0:${#words[@]}-${#arguments[@]}}"; do
      if [[ $word != --dry_run ]]; then options+=("$word"); fi
    done
    printf '%s | %s\n' "$(quoted "$root/scripts/gke.sh" manifest "${options[@]}" \
      "${arguments[@]}")" "$(quoted kubectl apply --filename=-)"
    return
  fi
  kubectl apply --filename=- <<<"$text"
}

xpk() {
  need name "$name" image "$image" cluster "$cluster" zone "$zone"
  check_slices
  if $spot || $flex_start || $host_network || [[ -n $service_account$reservation ]]; then
    mistake "--spot, --flex_start, --reservation, --host_network and --service_account are of pool" \
      "and manifest: XPK's cluster decides them"
  fi
  # XPK starts a job again at signals only (42 and 127 to 255); 1 is a crash of Python's.
  run xpk workload create "--workload=$name" "--cluster=$cluster" "--zone=$zone" \
    ${project:+"--project=$project"} "--tpu-type=$SLICE_TYPE" "--num-slices=$slices" \
    "--docker-image=$image" "--max-restarts=$max_restarts" --restart-on-exit-codes=1 \
    "${env[@]/#/--env=}" "--command=$(quoted bash /m4/scripts/tpu_host.sh run "${arguments[@]}")"
}

status() {
  need name "$name"
  run kubectl get jobset "$name"
  run kubectl get pods "--selector=jobset.sigs.k8s.io/jobset-name=$name"
}

logs() {
  need name "$name"
  local labels=jobset.sigs.k8s.io/jobset-name=$name
  labels+=,jobset.sigs.k8s.io/job-index=$slice_index
  labels+=,batch.kubernetes.io/job-completion-index=$worker
  run kubectl logs --follow --tail=200 "--selector=$labels"
}

delete() {
  need name "$name"
  run kubectl delete jobset "$name"
}

show_help "$@"
command=${1:-}
[[ $command =~ ^(image|pool|manifest|apply|xpk|status|logs|delete)$ ]] ||
  mistake "command '$command': must be image, pool, manifest, apply, xpk, status, logs or delete"
shift
words=("$@")
parse "$@"
check
if [[ $command =~ ^(manifest|apply|xpk)$ ]]; then
  check_job "${arguments[@]:0:1}"
  [[ ${arguments[*]} != *[[:cntrl:]]* ]] || mistake "an argument has a control character in it"
else
  ((${#arguments[@]} == 0)) || mistake "$command takes nothing behind --"
fi
"$command"
