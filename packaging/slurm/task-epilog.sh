#!/bin/sh
# Slurm's TaskEpilog (slurm.conf: TaskEpilog=/etc/impresario/slurm/task-epilog.sh): keeps what guided I/O did for the job. Each
# task that ends writes the report of its node anew; with IMPRESARIO_ASSIST_REPORTS, a folder, below it, else nothing.

[ -n "$IMPRESARIO_ASSIST_REPORTS" ] && [ -S "$IMPRESARIO_ASSIST_SOCKET" ] || exit 0
unset LD_PRELOAD
to=$IMPRESARIO_ASSIST_REPORTS/guided-$SLURM_JOB_ID-$(uname -n).json
"${IMPRESARIO_PREFIX:-/usr/local}/bin/impresario" assist report --json --socket "$IMPRESARIO_ASSIST_SOCKET" >"$to.$$" 2>/dev/null &&
	mv "$to.$$" "$to" || rm -f "$to.$$"
exit 0
