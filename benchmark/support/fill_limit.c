/* What it takes at least to fill new shared memory: the system calls of a cache, without the cache.
 *
 *     gcc -O2 -o fill-limit benchmark/support/fill_limit.c && ./fill-limit [ROUNDS]
 *
 * Each way writes 16,384 rows of 12 KB, 8 bytes apart, to a new memfd. Figures are medians. Before each clock starts, as much
 * memory is taken and released.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

enum { ROWS = 16384, ROW = 12288, SLOT = ROW + 8, STEP = 1 << 16, PIECE = 1 << 20, MOST_ROUNDS = 64 };

static const long total = (long)ROWS * SLOT;
static char *source;
static int shuffled[ROWS];

static void check(int is_right) {
    if (!is_right) {
        perror("fill-limit");
        exit(1);
    }
}

static long least(long first, long second) { return first < second ? first : second; }

static void write_at(int fd, long at, long nbytes) { check(pwrite(fd, source + at, nbytes, at) == nbytes); }

static void write_pieces(int fd) {
    for (long at = 0; at < total; at += PIECE) write_at(fd, at, least(PIECE, total - at));
}

static void copy_into_map(int fd) {
    char *memory = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    check(memory != MAP_FAILED);
    memcpy(memory, source, total);
    munmap(memory, total);
}

static void reserve_all(int fd) {
    check(!posix_fallocate(fd, 0, total));
    write_pieces(fd);
}

static void reserve_pieces(int fd) {
    for (long at = 0; at < total; at += PIECE) check(!posix_fallocate(fd, at, least(PIECE, total - at)));
    for (long row = 0; row < ROWS; row++) write_at(fd, row * SLOT, ROW);
}

static void reserve_steps(int fd) {
    static char reserved[(long)ROWS * SLOT / STEP + 1];
    memset(reserved, 0, sizeof reserved);
    for (int number = 0; number < ROWS; number++) {
        long at = (long)shuffled[number] * SLOT;
        for (long step = at / STEP; step <= (at + ROW - 1) / STEP; step++)
            if (!reserved[step]) {
                check(!posix_fallocate(fd, step * STEP, least(STEP, total - step * STEP)));
                reserved[step] = 1;
            }
        write_at(fd, at, ROW);
    }
}

static void reserve_nothing(int fd) {
    for (int number = 0; number < ROWS; number++) write_at(fd, (long)shuffled[number] * SLOT, ROW);
}

static void stack(int fd) {
    static char batch[256L * ROW];
    (void)fd;
    for (int number = 0; number < ROWS; number++) memcpy(batch + number % 256L * ROW, source + (long)shuffled[number] * SLOT, ROW);
}

static const struct {
    const char *name;
    void (*run)(int fd);
} ways[] = {
    {"bare copy: pwrite of 1 MiB pieces", write_pieces},
    {"a map and memcpy", copy_into_map},
    {"reserved at once, then 1 MiB pieces", reserve_all},
    {"rows in order, reserved by 1 MiB", reserve_pieces},
    {"rows in random order, reserved by 64 KiB", reserve_steps},
    {"rows in random order, not reserved", reserve_nothing},
    {"stacking the rows", stack},
};
enum { WAYS = sizeof ways / sizeof *ways };

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static double seconds_of(int way) {
    char *settled = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(settled != MAP_FAILED);
    memset(settled, 1, total);
    munmap(settled, total);
    int fd = memfd_create("fill-limit", 0);
    check(fd >= 0 && !ftruncate(fd, total));
    double began = now();
    ways[way].run(fd);
    double took = now() - began;
    close(fd);
    return took;
}

static int compare(const void *first, const void *second) {
    double difference = *(const double *)first - *(const double *)second;
    return (difference > 0) - (difference < 0);
}

int main(int count, char **arguments) {
    static double took[WAYS][MOST_ROUNDS];
    int rounds = count > 1 ? atoi(arguments[1]) : 9;
    struct utsname system;
    if (rounds < 1 || rounds > MOST_ROUNDS) {
        fprintf(stderr, "fill-limit: 1 to %d rounds\n", MOST_ROUNDS);
        return 2;
    }
    check(!uname(&system) && (source = malloc(total)));
    memset(source, 1, total);
    srand(1);
    for (int row = 0; row < ROWS; row++) {  /* Fisher and Yates, inside out */
        int other = rand() % (row + 1);
        shuffled[row] = shuffled[other];
        shuffled[other] = row;
    }
    for (int round = -1; round < rounds; round++)
        for (int way = 0; way < WAYS; way++) {
            double seconds = seconds_of(way);
            if (round >= 0) took[way][round] = seconds;  /* one round is not counted */
        }
    printf("Linux %s\n| way | us a row | to the bare copy |\n| --- | ---: | ---: |\n", system.release);
    for (int way = 0; way < WAYS; way++) {
        qsort(took[way], rounds, sizeof **took, compare);
        double median = took[way][rounds / 2];
        printf("| %s | %.2f | %.2f |\n", ways[way].name, median / ROWS * 1e6, median / took[0][rounds / 2]);
    }
    return 0;
}
