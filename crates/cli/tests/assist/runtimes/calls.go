// Reads pieces of two files, one by Go's own system calls and one by the C library, and prints a checksum of each.

package main

/*
#include <fcntl.h>
#include <unistd.h>

static int open_it(const char *path) { return open(path, O_RDONLY); }
*/
import "C"

import (
	"os"
	"strconv"
	"unsafe"
)

func main() {
	piece, _ := strconv.Atoi(os.Args[3])
	stride, _ := strconv.Atoi(os.Args[4])
	count, _ := strconv.Atoi(os.Args[5])
	bytes := make([]byte, piece)
	var own, byC uint64
	file, err := os.Open(os.Args[1])
	if err != nil {
		panic(err)
	}
	path := append([]byte(os.Args[2]), 0)
	fd := C.open_it((*C.char)(unsafe.Pointer(&path[0])))
	for i := 0; i < count; i++ {
		n, _ := file.ReadAt(bytes, int64(i*stride))
		own = add(own, bytes[:n])
		n = int(C.pread(fd, unsafe.Pointer(&bytes[0]), C.size_t(piece), C.off_t(i*stride)))
		byC = add(byC, bytes[:n])
	}
	C.close(fd)
	os.Stdout.WriteString(strconv.FormatUint(own, 16) + " " + strconv.FormatUint(byC, 16) + "\n")
}

func add(sum uint64, bytes []byte) uint64 {
	for _, b := range bytes {
		sum = sum*31 + uint64(b)
	}
	return sum
}
