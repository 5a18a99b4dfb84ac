# To be sourced: `until_done COMMAND...` passes the scheduler's warning on, waits while the command saves and writes its
# record, and puts the job back into the queue where the cluster allows it.
until_done() {
  local warned=0 code=0
  "$@" &
  local child=$!
  trap 'warned=1; kill -TERM "$child" 2>/dev/null' TERM USR1
  wait "$child" || code=$?
  # a trapped signal ends the first wait; the second one has the command's own exit code
  while kill -0 "$child" 2>/dev/null; do code=0; wait "$child" || code=$?; done
  trap - TERM USR1
  if [ "$warned" = 1 ] && [ "$code" != 0 ]; then
    scontrol requeue "$SLURM_JOB_ID" || echo "not requeued; submit the same script again to go on" >&2
  fi
  return "$code"
}
