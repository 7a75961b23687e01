#!/usr/bin/env bash
# Jobs on TPU slices of a GKE cluster, as a JobSet or with XPK: docs/cloud_tpu.md.
#
#   scripts/gke.sh COMMAND [OPTIONS] [-- ARGUMENTS]
#
#   image      builds the image from the Dockerfile and pushes it       --image
#   pool       adds a node pool that is one slice                       --name --cluster --zone --slice
#   manifest   prints the JobSet that runs `m4 ARGUMENTS` on a slice    --name --image --slice
#   apply      the same, given to the cluster
#   xpk        the same job by XPK instead                              ... --cluster --zone
#   status     the JobSet and its pods                                  --name
#   logs       follows the log of one host                              --name
#   delete     ends the job: it saves its step first                    --name
#
#   --name=NAME          of the job or the pool       --image=IMAGE    repository/name:tag
#   --slice=v4-128       v4-... or v5e-...            --cluster=NAME   --zone=ZONE
#   --spot               cheaper, can be preempted    --project=PROJECT  default: gcloud's
#   --service_account=N  Kubernetes' account that may read and write the bucket
#   --max_restarts=100   of the whole job; a preemption is one
#   --worker=0           whose log
#   --dry_run            prints every command, one a line, and runs nothing
set -euo pipefail
shopt -s inherit_errexit

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/common.sh
source "$root/scripts/common.sh"

name="" image="" slice="" cluster="" zone="" project="" service_account=""
spot=false max_restarts=100 worker=0 arguments=()

parse() {
  while (($#)); do
    case $1 in
      --name=*) name=${1#*=} ;;
      --image=*) image=${1#*=} ;;
      --slice=*) slice=${1#*=} ;;
      --cluster=*) cluster=${1#*=} ;;
      --zone=*) zone=${1#*=} ;;
      --project=*) project=${1#*=} ;;
      --service_account=*) service_account=${1#*=} ;;
      --max_restarts=*) max_restarts=${1#*=} ;;
      --worker=*) worker=${1#*=} ;;
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
  whole_number max_restarts "$max_restarts"
  whole_number worker "$worker"
  [[ -z $name ]] || check_name name "$name"
  [[ -z $service_account ]] || check_name service_account "$service_account"
  [[ $image =~ ^[A-Za-z0-9_./:@-]*$ ]] || mistake "--image=$image: repository/name:tag"
}

image() {
  need image "$image"
  run docker build "--tag=$image" "$root"
  run docker push "$image"
}

pool() {
  need name "$name" cluster "$cluster" zone "$zone" slice "$slice"
  describe_slice "$slice"
  local flags=()
  if $spot; then flags+=(--spot); fi
  run gcloud container node-pools create "$name" "--cluster=$cluster" \
    "--location=${zone%-*}" "--node-locations=$zone" ${project:+"--project=$project"} \
    "--machine-type=$SLICE_MACHINE" "--tpu-topology=$SLICE_TOPOLOGY" "--num-nodes=$SLICE_HOSTS" \
    "${flags[@]}"
}

# A YAML string: JSON's, which YAML takes.
yaml() {
  local text=${1//\\/\\\\}
  text=${text//\"/\\\"}
  # Kubernetes puts variables in the place of $(NAME); $$( is $( itself.
  printf '"%s"' "${text//"\$("/"\$\$("}"
}

# All hosts of a slice are one Job; one that fails fails the Job, and the JobSet restarts all of them.
manifest() {
  need name "$name" image "$image" slice "$slice"
  describe_slice "$slice"
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
    replicas: 1
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
            hostNetwork: true
            dnsPolicy: ClusterFirstWithHostNet
            # m4 ends at SIGTERM, after the step that it is at is saved.
            terminationGracePeriodSeconds: 300
YAML
  if [[ -n $service_account ]]; then
    printf '            serviceAccountName: %s\n' "$(yaml "$service_account")"
  fi
  cat <<YAML
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: $SLICE_GKE
              cloud.google.com/gke-tpu-topology: $SLICE_TOPOLOGY
YAML
  if $spot; then printf '              cloud.google.com/gke-spot: "true"\n'; fi
  cat <<YAML
            containers:
            - name: m4
              image: $(yaml "$image")
              args:
YAML
  local argument
  for argument in "${arguments[@]}"; do
    printf '              - %s\n' "$(yaml "$argument")"
  done
  cat <<YAML
              resources:
                limits:
                  google.com/tpu: 4
YAML
}

apply() {
  if $DRY_RUN; then
    need name "$name" image "$image" slice "$slice"
    describe_slice "$slice"
    local options=("--name=$name" "--image=$image" "--slice=$slice"
      "--max_restarts=$max_restarts" ${service_account:+"--service_account=$service_account"})
    if $spot; then options+=(--spot); fi
    printf '%s | %s\n' "$(quoted "$root/scripts/gke.sh" manifest "${options[@]}" -- \
      "${arguments[@]}")" "$(quoted kubectl apply --filename=-)"
    return
  fi
  local text
  text=$(manifest)
  kubectl apply --filename=- <<<"$text"
}

xpk() {
  need name "$name" image "$image" slice "$slice" cluster "$cluster" zone "$zone"
  describe_slice "$slice"
  if $spot || [[ -n $service_account ]]; then
    mistake "--spot and --service_account are of pool and manifest: XPK's cluster decides them"
  fi
  # XPK starts a job again at signals only (42 and 127 to 255); 1 is a crash of Python's.
  run xpk workload create "--workload=$name" "--cluster=$cluster" "--zone=$zone" \
    ${project:+"--project=$project"} "--tpu-type=$SLICE_TYPE" --num-slices=1 \
    "--docker-image=$image" "--max-restarts=$max_restarts" --restart-on-exit-codes=1 \
    "--command=$(quoted m4 "${arguments[@]}")"
}

status() {
  need name "$name"
  run kubectl get jobset "$name"
  run kubectl get pods "--selector=jobset.sigs.k8s.io/jobset-name=$name"
}

logs() {
  need name "$name"
  local labels=jobset.sigs.k8s.io/jobset-name=$name
  labels+=,batch.kubernetes.io/job-completion-index=$worker
  run kubectl logs --follow --tail=200 "--selector=$labels"
}

delete() {
  need name "$name"
  run kubectl delete jobset "$name"
}

((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || mistake "needs bash 4.4 or later"
command=${1:-}
[[ $command =~ ^(image|pool|manifest|apply|xpk|status|logs|delete)$ ]] ||
  mistake "command '$command': must be image, pool, manifest, apply, xpk, status, logs or delete"
shift
parse "$@"
if [[ $command =~ ^(manifest|apply|xpk)$ ]]; then
  check_job "${arguments[@]:0:1}"
  [[ ${arguments[*]} != *[[:cntrl:]]* ]] || mistake "an argument has a control character in it"
else
  ((${#arguments[@]} == 0)) || mistake "$command takes nothing behind --"
fi
"$command"
