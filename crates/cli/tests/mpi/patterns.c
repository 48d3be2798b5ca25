/*
 * What parallel programs do to shared files through MPI-IO: independent and collective, contiguous and strided, with views,
 * shared pointers and atomicity. Each rank finds the files in one of the folders that are the arguments. All that is read is
 * checked; the files are left for comparison.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(call) check(call, #call, __LINE__)

static int rank, ranks;
static const char *folder;

#ifdef MPICH_VERSION
/*
 * MPICH over UCX waits for other ranks without ever giving its processor to one, whatever MPIR_CVAR_POLLS_BEFORE_YIELD says.
 * There are fewer processors than ranks: one that has nothing to do for a while sleeps.
 */
unsigned ucp_worker_progress(void *worker)
{
	static unsigned (*progress)(void *);
	static unsigned idle;
	unsigned done;

	if (!progress)
		*(void **)&progress = dlsym(RTLD_NEXT, "ucp_worker_progress");
	done = progress(worker);
	idle = done ? 0 : idle + 1;
	if (idle > 100)
		usleep(20);
	return done;
}
#else
/*
 * A rank of Open MPI that waits yields its processor (mpi_yield_when_idle), and gets it back at once where the others wait, too.
 * It sleeps instead, which leaves the processor to the servers.
 */
int sched_yield(void)
{
	usleep(20);
	return 0;
}
#endif

static void fail(const char *what, int line)
{
	fprintf(stderr, "rank %d, line %d: %s\n", rank, line, what);
	MPI_Abort(MPI_COMM_WORLD, 1);
}

static void check(int code, const char *what, int line)
{
	char text[MPI_MAX_ERROR_STRING];
	int len, last = errno;

	if (code == MPI_SUCCESS)
		return;
	MPI_Error_string(code, text, &len);
	fprintf(stderr, "%s (the last error of a call: %s)\n", text, strerror(last));
	fail(what, line);
}

/* The byte of a file at an offset. */
static unsigned char byte_at(int file, MPI_Offset offset)
{
	unsigned long x = (unsigned long)offset * 2654435761u + (unsigned long)file * 40503;
	return (x >> 13) ^ x;
}

static MPI_File open_file(int number, int mode)
{
	char path[4096];
	MPI_File file;

	snprintf(path, sizeof path, "%s/f%d", folder, number);
	CHECK(MPI_File_open(MPI_COMM_WORLD, path, mode, MPI_INFO_NULL, &file));
	return file;
}

static MPI_File create(int number)
{
	return open_file(number, MPI_MODE_CREATE | MPI_MODE_RDWR);
}

static void close_file(MPI_File file)
{
	CHECK(MPI_File_close(&file));
	MPI_Barrier(MPI_COMM_WORLD);
}

/* What one rank wrote is there for the others. */
static void settle(MPI_File file)
{
	CHECK(MPI_File_sync(file));
	MPI_Barrier(MPI_COMM_WORLD);
	CHECK(MPI_File_sync(file));
}

static void expect(int number, const unsigned char *bytes, MPI_Offset offset, int len, int line)
{
	for (int i = 0; i < len; i++)
		if (bytes[i] != byte_at(number, offset + i)) {
			fprintf(stderr, "file %d is wrong at %lld\n", number, (long long)offset + i);
			fail("contents", line);
		}
}

static void count(MPI_Status *status, int wanted, int line)
{
	int got;

	MPI_Get_count(status, MPI_BYTE, &got);
	if (got != wanted)
		fail("a short read or write", line);
}

/* Blocks one behind the other, of a length that no boundary fits. */
static void contiguous(int number, int collective, int nonblocking)
{
	enum { BLOCK = 100003 };
	unsigned char *bytes = malloc(BLOCK);
	MPI_File file = create(number);
	MPI_Status status;
	MPI_Request request;

	for (int round = 0; round < 3; round++) {
		MPI_Offset at = (MPI_Offset)(round * ranks + rank) * BLOCK;
		for (int i = 0; i < BLOCK; i++)
			bytes[i] = byte_at(number, at + i);
		if (nonblocking) {
			CHECK(MPI_File_iwrite_at(file, at, bytes, BLOCK, MPI_BYTE, &request));
			CHECK(MPI_Wait(&request, &status));
		} else if (collective) {
			CHECK(MPI_File_write_at_all(file, at, bytes, BLOCK, MPI_BYTE, &status));
		} else {
			CHECK(MPI_File_write_at(file, at, bytes, BLOCK, MPI_BYTE, &status));
		}
		count(&status, BLOCK, __LINE__);
	}
	settle(file);
	for (int round = 0; round < 3; round++) {
		MPI_Offset at = (MPI_Offset)(round * ranks + (rank + 1 + round) % ranks) * BLOCK;
		memset(bytes, 0, BLOCK);
		if (nonblocking) {
			CHECK(MPI_File_iread_at(file, at, bytes, BLOCK, MPI_BYTE, &request));
			CHECK(MPI_Wait(&request, &status));
		} else if (collective) {
			CHECK(MPI_File_read_at_all(file, at, bytes, BLOCK, MPI_BYTE, &status));
		} else {
			CHECK(MPI_File_read_at(file, at, bytes, BLOCK, MPI_BYTE, &status));
		}
		count(&status, BLOCK, __LINE__);
		expect(number, bytes, at, BLOCK, __LINE__);
	}
	close_file(file);
	free(bytes);
}

/* Small pieces in turn, by a view: without collective calls a library may read, change and write what lies between. */
static void strided(int number, int collective)
{
	enum { PIECE = 700, PIECES = 60 };
	unsigned char *bytes = malloc(PIECE * PIECES);
	MPI_Datatype pieces;
	MPI_File file = create(number);
	MPI_Status status;

	MPI_Type_vector(PIECES, PIECE, PIECE * ranks, MPI_BYTE, &pieces);
	MPI_Type_commit(&pieces);
	for (int pass = 0; pass < 2; pass++) {
		/* To read, each rank has the view of another. */
		int place = pass ? (rank + 1) % ranks : rank;
		CHECK(MPI_File_set_view(file, (MPI_Offset)place * PIECE, MPI_BYTE, pieces, "native", MPI_INFO_NULL));
		for (int i = 0; i < PIECE * PIECES; i++)
			bytes[i] = pass ? 0 : byte_at(number, (MPI_Offset)(i / PIECE * ranks + place) * PIECE + i % PIECE);
		if (!pass && collective)
			CHECK(MPI_File_write_all(file, bytes, PIECE * PIECES, MPI_BYTE, &status));
		else if (!pass)
			CHECK(MPI_File_write(file, bytes, PIECE * PIECES, MPI_BYTE, &status));
		else if (collective)
			CHECK(MPI_File_read_all(file, bytes, PIECE * PIECES, MPI_BYTE, &status));
		else
			CHECK(MPI_File_read(file, bytes, PIECE * PIECES, MPI_BYTE, &status));
		count(&status, PIECE * PIECES, __LINE__);
		settle(file);
		for (int i = 0; pass && i < PIECES; i++)
			expect(number, bytes + i * PIECE, (MPI_Offset)(i * ranks + place) * PIECE, PIECE, __LINE__);
	}
	MPI_Type_free(&pieces);
	close_file(file);
	free(bytes);
}

/* A matrix that is written by blocks of rows and columns and read by columns. */
static void matrix(int number)
{
	enum { SIDE = 240 };
	int grid[2] = { 0, 0 };
	unsigned char *bytes = malloc(SIDE * SIDE);
	MPI_File file = create(number);
	MPI_Status status;

	MPI_Dims_create(ranks, 2, grid);
	for (int pass = 0; pass < 2; pass++) {
		int whole[2] = { SIDE, SIDE };
		int part[2] = { SIDE / grid[0], SIDE / grid[1] };
		int start[2] = { rank / grid[1] * part[0], rank % grid[1] * part[1] };
		MPI_Datatype block;
		if (pass) {
			part[0] = SIDE;
			part[1] = SIDE / ranks;
			start[0] = 0;
			start[1] = rank * part[1];
		}
		int len = part[0] * part[1];
		MPI_Type_create_subarray(2, whole, part, start, MPI_ORDER_C, MPI_BYTE, &block);
		MPI_Type_commit(&block);
		CHECK(MPI_File_set_view(file, 0, MPI_BYTE, block, "native", MPI_INFO_NULL));
		for (int i = 0; i < len; i++)
			bytes[i] = byte_at(number, (MPI_Offset)(start[0] + i / part[1]) * SIDE + start[1] + i % part[1]);
		if (!pass) {
			CHECK(MPI_File_write_all(file, bytes, len, MPI_BYTE, &status));
		} else {
			unsigned char *got = malloc(len);
			CHECK(MPI_File_read_all(file, got, len, MPI_BYTE, &status));
			if (memcmp(got, bytes, len) != 0)
				fail("the matrix", __LINE__);
			free(got);
		}
		count(&status, len, __LINE__);
		settle(file);
		MPI_Type_free(&block);
	}
	close_file(file);
	free(bytes);
}

/* One position for all: in the order of ranks, and in any. */
static void shared_position(int number)
{
	enum { BLOCK = 5000 };
	unsigned char bytes[BLOCK];
	MPI_File file = create(number);
	MPI_Status status;
	MPI_Offset size;

	for (int round = 0; round < 3; round++) {
		for (int i = 0; i < BLOCK; i++)
			bytes[i] = byte_at(number, (MPI_Offset)(round * ranks + rank) * BLOCK + i);
		CHECK(MPI_File_write_ordered(file, bytes, BLOCK, MPI_BYTE, &status));
	}
	settle(file);
	CHECK(MPI_File_get_size(file, &size));
	if (size != (MPI_Offset)3 * ranks * BLOCK)
		fail("the size", __LINE__);
	close_file(file);

	file = create(number + 1);
	memset(bytes, 'a' + rank, BLOCK);
	for (int round = 0; round < 4; round++)
		CHECK(MPI_File_write_shared(file, bytes, BLOCK, MPI_BYTE, &status));
	settle(file);
	if (rank == 0) {
		int seen[64] = { 0 };
		for (int i = 0; i < 4 * ranks; i++) {
			CHECK(MPI_File_read_at(file, (MPI_Offset)i * BLOCK, bytes, BLOCK, MPI_BYTE, &status));
			count(&status, BLOCK, __LINE__);
			for (int j = 0; j < BLOCK; j++)
				if (bytes[j] != bytes[0])
					fail("a torn record", __LINE__);
			seen[bytes[0] - 'a']++;
		}
		for (int i = 0; i < ranks; i++)
			if (seen[i] != 4)
				fail("a lost record", __LINE__);
	}
	MPI_Barrier(MPI_COMM_WORLD);
	CHECK(MPI_File_set_size(file, 0));
	close_file(file);
}

/* With atomicity nothing has to be synced to be seen; then lengths. */
static void atomic(int number)
{
	enum { BLOCK = 40000 };
	unsigned char *bytes = malloc(BLOCK);
	MPI_File file = create(number);
	MPI_Status status;
	MPI_Offset size;

	CHECK(MPI_File_set_atomicity(file, 1));
	for (int round = 0; round < 4; round++) {
		int writer = round % ranks;
		MPI_Offset at = (MPI_Offset)round * 12345;
		for (int i = 0; i < BLOCK; i++)
			bytes[i] = rank == writer ? byte_at(number, at + i) : 0;
		if (rank == writer)
			CHECK(MPI_File_write_at(file, at, bytes, BLOCK, MPI_BYTE, &status));
		MPI_Barrier(MPI_COMM_WORLD);
		CHECK(MPI_File_read_at(file, at, bytes, BLOCK, MPI_BYTE, &status));
		count(&status, BLOCK, __LINE__);
		expect(number, bytes, at, BLOCK, __LINE__);
		MPI_Barrier(MPI_COMM_WORLD);
	}
	CHECK(MPI_File_set_atomicity(file, 0));
	CHECK(MPI_File_preallocate(file, 200000));
	settle(file);
	CHECK(MPI_File_get_size(file, &size));
	if (size != 200000)
		fail("the size after preallocation", __LINE__);
	MPI_Barrier(MPI_COMM_WORLD);
	CHECK(MPI_File_set_size(file, 77777));
	settle(file);
	CHECK(MPI_File_get_size(file, &size));
	if (size != 77777)
		fail("the size after cutting", __LINE__);
	close_file(file);
	/* Another open sees it all. */
	file = open_file(number, MPI_MODE_RDONLY);
	CHECK(MPI_File_read_at_all(file, 0, bytes, BLOCK, MPI_BYTE, &status));
	expect(number, bytes, 0, BLOCK, __LINE__);
	close_file(file);
	free(bytes);
}

int main(int argc, char **argv)
{
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	folder = argv[1 + rank % (argc - 1)];
	contiguous(0, 0, 0);
	contiguous(1, 1, 0);
	contiguous(2, 0, 1);
	strided(3, 0);
	strided(4, 1);
	matrix(5);
	shared_position(6);
	atomic(8);
	if (rank == 0)
		printf("good\n");
	MPI_Finalize();
	return 0;
}
