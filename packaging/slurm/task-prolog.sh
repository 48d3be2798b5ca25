#!/bin/sh
# Slurm's TaskProlog (slurm.conf: TaskProlog=/etc/impresario/slurm/task-prolog.sh): guided I/O for every job, without a word
# in its script. Runs as the job's user within the job's cgroup, so what is prefetched is charged to the job. Starts one
# advice manager for each step and node, which ends with the step; lines "export NAME=VALUE" that it prints change the task's environment. Whatever goes
# wrong here, the job runs as without it. `export IMPRESARIO_ASSIST=off` before sbatch switches it off for a job.

prefix=${IMPRESARIO_PREFIX:-/usr/local}
hints=${IMPRESARIO_ASSIST_HINTS:-/etc/impresario/hints.json}
[ "$IMPRESARIO_ASSIST" = off ] && exit 0
[ -n "$SLURM_JOB_ID" ] && [ -x "$prefix/bin/impresario" ] && [ -r "$hints" ] || exit 0

folder=${IMPRESARIO_JOBS:-/tmp}/impresario-$(id -u)-$SLURM_JOB_ID.${SLURM_STEP_ID:-0}
# The first task of a step on a node makes the folder and starts the manager. A folder that somebody else made is not used.
if mkdir -m 700 "$folder" 2>/dev/null; then
	LD_PRELOAD='' "$prefix/bin/impresario" assist daemon --config "$hints" --socket "$folder/assist.sock" \
		</dev/null >"$folder/log" 2>&1 &
	echo $! >"$folder/pid"
fi
[ -O "$folder" ] && [ ! -L "$folder" ] || exit 0
# So that the task's first reads are seen; a manager that does not start is not waited for.
left=20
while [ ! -S "$folder/assist.sock" ] && [ $left -gt 0 ] && kill -0 "$(cat "$folder/pid" 2>/dev/null)" 2>/dev/null; do
	left=$((left - 1))
	sleep 0.05
done

library=$prefix/lib/impresario/preload/\$PLATFORM/libimpresario_assist.so
# Not twice: a step that `impresario assist run` started has it already.
case $LD_PRELOAD in
*libimpresario_assist.so*) ;;
*) echo "export LD_PRELOAD=$library${LD_PRELOAD:+:$LD_PRELOAD}" ;;
esac
echo "export IMPRESARIO_ASSIST_SOCKET=$folder/assist.sock"
exit 0
