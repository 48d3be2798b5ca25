// Reads pieces of a file without any C library, and prints a checksum.

package main

import (
	"os"
	"strconv"
)

func main() {
	piece, _ := strconv.Atoi(os.Args[2])
	stride, _ := strconv.Atoi(os.Args[3])
	count, _ := strconv.Atoi(os.Args[4])
	bytes := make([]byte, piece)
	var sum uint64
	file, err := os.Open(os.Args[1])
	if err != nil {
		panic(err)
	}
	for i := 0; i < count; i++ {
		n, _ := file.ReadAt(bytes, int64(i*stride))
		for _, b := range bytes[:n] {
			sum = sum*31 + uint64(b)
		}
	}
	os.Stdout.WriteString(strconv.FormatUint(sum, 16) + "\n")
}
