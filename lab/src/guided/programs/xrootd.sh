# Serves a folder by a server of XRootD, reads pieces of a file of it through that, and ends it.
#   xrootd.sh FOLDER SCRATCH PROGRAM FILE
own=$2/xrootd
rm -rf "$own" && mkdir -p "$own" || exit 1
cat > "$own/cf" <<END
all.export / r/o
oss.localroot $1
all.adminpath $own
all.pidpath $own
xrd.network nodnr
END
# It refuses to be root. In a name space of its own it has no name, and is the owner of root's files all the same.
apart=
[ "$(id -u)" != 0 ] || apart='unshare --user'
$apart xrootd -p any -c "$own/cf" -l "$own/log" &
server=$!
trap '{ kill $server; wait $server; } 2>/dev/null' EXIT
for try in $(seq 300); do
    port=$(sed -n 's/.* anon@.*:\([0-9]*\) initialization completed.*/\1/p' "$own/log" "$own"/*/log 2>/dev/null | head -n 1)
    [ -z "$port" ] || break
    sleep 0.01
done
[ -n "$port" ] || exit 1
LD_PRELOAD=${LD_PRELOAD:+$LD_PRELOAD:}libXrdPosixPreload.so "$3" strided "root://127.0.0.1:$port//$4"
