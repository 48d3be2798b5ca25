/* Writes a file through the server, syncs it, reads it back and compares every byte.
 *
 *   client PORT NUMBER REQUESTS [LEN]     NUMBER names the file; requests are sent eight at a time
 */
#define _GNU_SOURCE
#include <impresario.h> /* only for the names of operations */

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "protocol.h"

#define AHEAD 8

static unsigned char byte_of(uint64_t file, uint64_t at) {
    uint64_t x = (file + 1) * 0x9e3779b97f4a7c15u ^ at * 0xc2b2ae3d27d4eb4fu;
    return (unsigned char)(x >> 29 ^ x >> 7);
}

static int die(const char *what) {
    fprintf(stderr, "client: %s\n", what);
    exit(1);
}

static void send_ask(int fd, uint32_t op, uint64_t file, uint64_t block, uint32_t len, unsigned char *data) {
    struct ask ask = { op, len, file, block * len, block };
    if (write_all(fd, &ask, sizeof ask) != 1) die("the server has gone");
    if (op == IMPRESARIO_WRITE) {
        for (uint32_t i = 0; i < len; i++) data[i] = byte_of(file, ask.offset + i);
        if (write_all(fd, data, len) != 1) die("the server has gone");
    }
}

static void get_answer(int fd, uint32_t op, uint64_t file, uint32_t len, unsigned char *data) {
    struct answer a;
    if (read_all(fd, &a, sizeof a) != 1) die("the server has gone");
    if (a.error) die(strerror(a.error));
    if (op != IMPRESARIO_READ) return;
    if (a.len != len || read_all(fd, data, len) != 1) die("a short read");
    for (uint32_t i = 0; i < len; i++)
        if (data[i] != byte_of(file, a.tag * len + i)) die("a wrong byte");
}

int main(int argc, char **argv) {
    if (argc < 4) return fprintf(stderr, "usage: %s PORT NUMBER REQUESTS [LEN]\n", argv[0]), 2;
    uint64_t file = strtoull(argv[2], NULL, 10), blocks = strtoull(argv[3], NULL, 10);
    uint32_t len = argc > 4 ? (uint32_t)atoi(argv[4]) : 8192;
    if (len == 0 || len > LEN_MAX) die("LEN is out of range");
    struct sockaddr_in address;
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons((uint16_t)atoi(argv[1]));
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address)) die("cannot connect");
    unsigned char *data = malloc(len);
    if (!data) die("no memory");

    static const uint32_t passes[] = { IMPRESARIO_WRITE, IMPRESARIO_SYNC, IMPRESARIO_READ, IMPRESARIO_UNLINK };
    for (size_t p = 0; p < sizeof passes / sizeof passes[0]; p++) {
        int whole = passes[p] == IMPRESARIO_SYNC || passes[p] == IMPRESARIO_UNLINK;
        uint64_t sent = 0, answered = 0, count = whole ? 1 : blocks;
        while (answered < count) {
            while (sent < count && sent - answered < AHEAD) {
                send_ask(fd, passes[p], file, sent, whole ? 0 : len, data);
                sent++;
            }
            get_answer(fd, passes[p], file, len, data);
            answered++;
        }
    }
    printf("client %llu: %llu blocks of %u bytes verified\n", (unsigned long long)file, (unsigned long long)blocks, len);
    free(data);
    close(fd);
    return 0;
}
