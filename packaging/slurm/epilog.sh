#!/bin/sh
# Slurm's Epilog (slurm.conf: Epilog=/etc/impresario/slurm/epilog.sh): ends the job's advice managers on this node, if
# Slurm has left one, and removes their folders. Runs as root, so a folder is believed only as far as its owner is the
# job's user.

[ -n "$SLURM_JOB_ID" ] && [ -n "$SLURM_JOB_UID" ] || exit 0
# As the user: neither a number nor a name in the folder can harm anyone else.
as_user() {
	if [ "$(id -u)" = "$SLURM_JOB_UID" ]; then "$@"; else setpriv --reuid "$SLURM_JOB_UID" --clear-groups -- "$@"; fi
}
for folder in "${IMPRESARIO_JOBS:-/tmp}/impresario-$SLURM_JOB_UID-$SLURM_JOB_ID".*; do
	[ -d "$folder" ] && [ ! -L "$folder" ] && [ "$(stat -c %u "$folder")" = "$SLURM_JOB_UID" ] || continue
	as_user sh -c '
		pid=$(cat "$1/pid" 2>/dev/null) && [ "$pid" -gt 1 ] 2>/dev/null || exit 0
		grep -q -a assist "/proc/$pid/cmdline" 2>/dev/null && kill "$pid"' sh "$folder"
	as_user rm -rf -- "$folder"
done
exit 0
