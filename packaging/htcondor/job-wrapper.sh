#!/bin/sh
# HTCondor's job wrapper (condor_config: USER_JOB_WRAPPER = /etc/impresario/htcondor/job-wrapper.sh): guided I/O for every job, by
# an advice manager of its own that ends with it. Runs as the job's user within the job's cgroup. The job's exit status is
# kept. In a submit file, `environment = "IMPRESARIO_ASSIST=off"` switches it off for a job, and
# `environment = "IMPRESARIO_ASSIST_REPORTS=FOLDER"` keeps its report there. Where the job has a home, it is learnt from.

impresario=${IMPRESARIO_PREFIX:-/usr/local}/bin/impresario
[ "$IMPRESARIO_ASSIST" != off ] && [ -x "$impresario" ] || exec "$@"
report=
# Names of the starter's folders are used once on a machine at a time.
[ -d "$IMPRESARIO_ASSIST_REPORTS" ] &&
	report=$IMPRESARIO_ASSIST_REPORTS/guided-$(basename "${_CONDOR_SCRATCH_DIR:-$$}")-$(uname -n).json
exec "$impresario" assist run -qq --learn ${report:+--report "$report"} -- "$@"
