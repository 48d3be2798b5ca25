#!/bin/sh
# HTCondor's job wrapper (condor_config: USER_JOB_WRAPPER = /etc/impresario/htcondor/job-wrapper.sh): guided I/O for every job, by
# an advice manager of its own that ends with it. Runs as the job's user within the job's cgroup. The job's exit status is
# kept. `environment = "IMPRESARIO_ASSIST=off"` in a submit file switches it off for a job.

impresario=${IMPRESARIO_PREFIX:-/usr/local}/bin/impresario
[ "$IMPRESARIO_ASSIST" != off ] && [ -x "$impresario" ] || exec "$@"
report=
[ -d "$_CONDOR_SCRATCH_DIR" ] && report=$_CONDOR_SCRATCH_DIR/guided.json
exec "$impresario" assist run -q ${report:+--report "$report"} -- "$@"
