# shellcheck shell=bash
# To be sourced: `until_done COMMAND...` passes the scheduler's warning on, waits while the command saves and writes its
# record, and puts the job back into the queue where the cluster allows it and nobody cancelled it.
until_done() {
  local warned=0 code=0 interrupted=1
  # a task by its own name: the bare number of an array's last task would mean them all
  local job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
  job=${job:-${SLURM_JOB_ID:-}}
  "$@" &
  local child=$!
  trap 'warned=1; interrupted=1; kill -TERM "$child" 2>/dev/null' TERM USR1
  # a trapped signal ends a wait early; the next one has the command's own exit code
  while [ "$interrupted" = 1 ]; do interrupted=0 code=0; wait "$child" || code=$?; done
  trap - TERM USR1
  # scancel ends a job by the same signal; what was cancelled is no longer RUNNING
  if [ "$warned" = 1 ] && [ "$code" != 0 ] && [ "$(squeue -h -j "$job" -o %T)" = RUNNING ]; then
    scontrol requeue "$job" || echo "not requeued; submit the same script again to go on" >&2
  fi
  return "$code"
}
